package verifying

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
	"github.com/spillway-ml/spillway/train/receipts"
)

func TestMain(m *testing.M) { os.Exit(ownworld.Run(m)) }

func TestDrawnSegmentsHaveSteps(t *testing.T) {
	alone := receipts.Segment{From: 4, To: 4}
	can := []receipts.Segment{{From: 0, To: 2}, {From: 2, To: 4}, alone}
	for range 50 {
		one := drawSegments(1, can)
		require.Len(t, one, 1)
		require.Positive(t, one[0].Steps())
	}
	require.Equal(t, can[:2], drawSegments(9, can))
	require.Equal(t, can[2:], drawSegments(1, can[2:]))
}
