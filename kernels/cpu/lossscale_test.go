package cpu

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	devcpu "github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/optest"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// gradScaler is the update of torch.cuda.amp.GradScaler. An overflow multiplies the scale by the
// backoff factor and resets the tracker. After growth_interval updates without overflow the scale
// is multiplied by the growth factor. With hysteresis, only that many overflows in a row reduce the
// scale.
type gradScaler struct {
	scale, growth, backoff, floor float64
	interval, tracker             int64
	hysteresis, overflows         int64
}

func (s *gradScaler) update(overflow bool) {
	if !overflow {
		s.overflows = 0
		if s.tracker++; s.tracker == s.interval {
			s.scale, s.tracker = s.scale*s.growth, 0
		}
		return
	}
	s.tracker = 0
	if s.overflows++; s.overflows >= s.hysteresis {
		s.scale, s.overflows = max(s.scale*s.backoff, s.floor), 0
	}
}

// For the same overflows the loss scale equals GradScaler's after every step: growth after exactly
// the interval, backoff, hysteresis and the floor.
func TestLossScaleFollowsGradScaler(t *testing.T) {
	pl := pool.New(1)
	defer pl.Close()
	for _, interval := range []int64{1, 2, 3, 7, 2000} {
		for _, hysteresis := range []int64{0, 1, 2, 3} {
			a := graph.LossScaleAttr{Growth: 2, Backoff: 0.5, Floor: 1, Interval: interval, Hysteresis: hysteresis}
			o := optest.Of(graph.LossScaleUpdate, a, [][]int64{{1}}, [][]int64{{graph.NumScale}}, 1, rand.New(rand.NewPCG(1, 1)), optionsOf(graph.F32))
			op := o.Op()
			b := bindProgram(t, o.P, pl)
			stream, err := b.ctx.NewStream(graph.Compute)
			require.NoError(t, err)
			state, err := devcpu.Slice[float64](b.ptr(op.Out[0].Buf))
			require.NoError(t, err)
			flag, err := devcpu.Slice[int32](b.ptr(op.In[0]))
			require.NoError(t, err)
			state[graph.ScaleValue], state[graph.ScaleClean] = 8, 0
			want := gradScaler{scale: 8, growth: 2, backoff: 0.5, floor: 1, interval: interval, hysteresis: max(hysteresis, 1)}
			rng := rand.New(rand.NewPCG(uint64(interval), uint64(hysteresis)))
			grown := false
			for step := range 3*interval + 300 {
				overflow := rng.IntN(40) == 0 || step%60 < 12 // 12 in a row reach the floor
				if interval > 100 {
					overflow = rng.IntN(3000) == 0
				}
				flag[0] = 0
				if overflow {
					flag[0] = 1
				}
				require.NoError(t, stream.Launch(b.kernels[0]))
				require.NoError(t, stream.Sync())
				before := want.scale
				want.update(overflow)
				require.Equal(t, []float64{want.scale, float64(want.tracker - want.overflows)}, state, "interval %d, hysteresis %d, step %d", interval, hysteresis, step)
				grown = grown || want.scale > before
			}
			require.True(t, grown)
			require.NoError(t, b.ctx.Close())
		}
	}
}
