package decimal

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestForms(t *testing.T) {
	for _, s := range []string{"0", "-0", "10", "+7", "-1", "100"} {
		require.NoError(t, CheckInt(s), s)
		_, err := Float(s)
		require.NoError(t, err, s)
	}
	for _, s := range []string{"1_0", "0x10", "0X1", "0b1", "0o7", "010", "-01"} {
		require.Error(t, CheckInt(s), s)
	}
	for s, want := range map[string]float64{"3e-4": 3e-4, "1E3": 1e3, ".5": .5, "0.10": .1, "007": 7} {
		got, err := Float(s)
		require.NoError(t, err, s)
		require.Equal(t, want, got)
	}
	for _, s := range []string{"1_0", "0x1p4", "0X1P-2", "1_0.5", "0x_1p0"} {
		_, err := Float(s)
		require.ErrorContains(t, err, "a plain decimal number is needed", s)
	}
	_, err := Float("ten")
	require.ErrorContains(t, err, "ParseFloat")
}
