package alloctest_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/alloctest"
)

var sink []byte

func TestPerRun(t *testing.T) {
	require.GreaterOrEqual(t, alloctest.PerRun(5, func() { sink = make([]byte, 100) }), 1.0, "an allocation a run")
	calls := 0
	require.Zero(t, alloctest.PerRun(5, func() {
		if calls++; calls < 20 {
			sink = make([]byte, 100)
		}
	}), "allocations of the first rounds only")
}
