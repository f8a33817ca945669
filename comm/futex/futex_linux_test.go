package futex_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm/futex"
)

func TestWait(t *testing.T) {
	var word atomic.Uint32
	word.Store(2)
	futex.Wait(&word, 1, time.Hour) // it is another value already
	began := time.Now()
	futex.Wait(&word, 2, 5*time.Millisecond)
	require.Less(t, time.Since(began), time.Minute)

	woken := make(chan struct{})
	go func() {
		for word.Load() == 2 {
			futex.Wait(&word, 2, time.Hour)
		}
		close(woken)
	}()
	word.Store(3)
	for {
		futex.Wake(&word)
		select {
		case <-woken:
			return
		case <-time.After(time.Millisecond):
		}
	}
}
