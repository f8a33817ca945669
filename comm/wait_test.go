package comm_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
)

// A Wait counts the time between its checks. A pause of the whole process counts as at most two
// intervals.
func TestWaitCountsNoPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := comm.NewWait(16 * time.Second)
		require.Equal(t, time.Second, w.Every)
		for range 3 {
			time.Sleep(w.Every)
			w.Look()
		}
		require.Equal(t, 3*time.Second, w.Counted)
		time.Sleep(time.Millisecond) // another goroutine woke the waiter
		w.Look()
		require.Equal(t, 3001*time.Millisecond, w.Counted)
		time.Sleep(time.Hour)
		w.Look()
		require.Equal(t, 5001*time.Millisecond, w.Counted)
	})
	require.Equal(t, time.Microsecond, comm.NewWait(time.Microsecond).Every)
	require.Equal(t, time.Millisecond, comm.NewWait(2*time.Millisecond).Every)
}
