package memplan

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

// TestTransformers holds the extent against the lower bound on programs of the
// shapes that presets have, and reports how long planning takes.
func TestTransformers(t *testing.T) {
	for _, c := range []struct {
		name      string
		layers    int
		width     int64
		ranks     int
		prefetch  int
		micros    int
		recompute bool
	}{
		{"gpt2", 12, 768, 4, 1, 1, false},
		{"gpt2 accumulating", 12, 768, 4, 2, 4, false},
		{"gpt2 recompute", 12, 768, 3, 1, 2, true},
		{"405b", 126, 16384, 64, 1, 1, false},
		{"405b recompute", 126, 16384, 64, 2, 4, true},
		{"405b narrow", 126, 1024, 8, 0, 4, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := transformer(c.layers, c.width, 1024, 50304, c.ranks, c.prefetch, c.micros, c.recompute)
			start := time.Now()
			l, err := Assign(p, Options{})
			took := time.Since(start)
			require.NoError(t, err)
			ops := 0
			for _, ph := range p.Sections[0].Phases {
				ops += len(ph.Ops)
			}
			u := l.Spaces[graph.Device]
			t.Logf("%d operations, %d buffers: %v, peak %.4f of the bound, at %s", ops, len(p.Buffers), took, float64(u.Peak)/float64(u.LowerBound), u.PeakAt)
			require.NoError(t, Check(p, l))
			require.LessOrEqual(t, float64(u.Peak), 1.02*float64(u.LowerBound))
		})
	}
}
