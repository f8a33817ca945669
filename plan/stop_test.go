package plan

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/zero"
)

// Build stops before any of its passes and during placement if Stop returns an error, and returns
// that error. Plans that share with it are not affected.
func TestAPlanStops(t *testing.T) {
	fwd := forwardOf(t, model.Config{Family: model.GPT2, Layers: 1, Width: 16, Heads: 2, Vocab: 20, Positions: 8}, 1, 8, false)
	enough := errors.New("enough")
	cfg := Config{Ranks: 2, Stage: zero.Stage(3), Accum: 1, Optimizer: adamW, Target: graph.CPUTarget()}
	want, err := Build(fwd, cfg)
	require.NoError(t, err)
	// after returns a configuration whose Stop fails after n calls, and the number of calls.
	after := func(n int64) (Config, *atomic.Int64) {
		asked, c := new(atomic.Int64), cfg
		c.Stop = func() error {
			if asked.Add(1) > n {
				return enough
			}
			return nil
		}
		return c, asked
	}
	c, asked := after(1 << 30)
	_, err = Build(fwd, c)
	require.NoError(t, err)
	all := asked.Load()
	require.Greater(t, all, int64(len(passes)+1), "before each pass, before buffers get a place, and meanwhile")
	step := int64(7) // every seventh call, or every call in the long form
	if long.On() {
		step = 1
	}
	for n := int64(0); n < all; n += step {
		c, asked := after(n)
		_, err := Build(fwd, c)
		require.ErrorIs(t, err, enough)
		require.Equal(t, n+1, asked.Load(), "nothing is done after it")
	}

	var sh Shared
	var group sync.WaitGroup
	for n := int64(0); n < all; n += step {
		c, _ := after(n)
		group.Go(func() {
			_, err := sh.Build(fwd, c)
			if err != nil && !errors.Is(err, enough) {
				t.Error(err)
			}
		})
		group.Go(func() {
			p, err := sh.Build(fwd, cfg)
			if err != nil || graph.Format(p.Program) != graph.Format(want.Program) {
				t.Errorf("beside one that stops: %v", err)
			}
		})
	}
	group.Wait()
	p, err := sh.Build(fwd, cfg)
	require.NoError(t, err)
	require.Nil(t, p.Config.Stop)
	require.Equal(t, graph.Format(want.Program), graph.Format(p.Program))
}
