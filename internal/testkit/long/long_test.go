package long

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSample(t *testing.T) {
	all := []int{1, 2, 3, 4, 5, 6, 7}
	t.Setenv("SPILLWAY_LONG", "")
	for n := range 9 {
		got := Sample(3, n, all)
		require.Len(t, got, min(n, len(all)))
		require.IsIncreasing(t, append([]int{0}, append(got, 8)...))
		require.Equal(t, got, Sample(3, n, all))
	}
	require.Equal(t, 1, Or(1, 2))
	t.Setenv("SPILLWAY_LONG", "1")
	require.Equal(t, all, Sample(3, 2, all))
	require.Equal(t, 2, Or(1, 2))
	require.Equal(t, 2, Of(1, 2, 3))
	require.Len(t, Draw(3, 2, all), 2)
	t.Setenv("SPILLWAY_LONG", "all")
	require.Equal(t, 2, Or(1, 2))
	require.Equal(t, 3, Of(1, 2, 3))
}
