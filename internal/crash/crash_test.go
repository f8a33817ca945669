package crash_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/crash"
)

func TestGuard(t *testing.T) {
	told := make(chan string, 1)
	crash.Handle(func(what string) { told <- what })
	ended := make(chan any, 1)
	go func() {
		defer func() { ended <- recover() }() // if the handler returns, the panic continues
		defer crash.Guard()
		var list []int
		_ = list[len(told)+3]
	}()
	require.Regexp(t, `^panic at crash_test\.go:\d+: runtime error: index out of range \[3\] with length 0$`, <-told)
	require.NotNil(t, <-ended)

	require.NotPanics(t, func() { defer crash.Guard() })
}
