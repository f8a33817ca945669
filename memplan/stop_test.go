package memplan

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// Wherever Assign is told to stop it does no more, and returns what it was told.
func TestAssignStops(t *testing.T) {
	p := transformer(24, 64, 128, 512, 4, 1, 2, false)
	enough := errors.New("enough")
	asked, until := 0, 1<<30
	stop := func() error {
		if asked++; asked > until {
			return enough
		}
		return nil
	}
	want, err := Assign(p, Options{})
	require.NoError(t, err)
	got, err := Assign(p, Options{Stop: stop})
	require.NoError(t, err)
	require.Equal(t, want, got)
	all := asked
	require.Greater(t, all, 8)
	for until = range all {
		asked = 0
		_, err := Assign(p, Options{Stop: stop})
		require.ErrorIs(t, err, enough)
		require.Equal(t, until+1, asked, "nobody is asked again")
	}
}
