package train

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/layouts"
	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// TestRecomputeGivesTheSameBits checks that recomputation changes no bit.
func TestRecomputeGivesTheSameBits(t *testing.T) {
	t.Parallel()
	for i, model := range []string{"gpt2", "llama-tied"} {
		for turn, ranks := range []int{1, 2, 3} {
			for _, accum := range inTurn(turn+i, []int{1, 3}) {
				c := tiny(model)
				c.Ranks, c.Accum, c.Steps, c.Reproducible = ranks, accum, 2, true
				policies := []string{"selective", "full"}
				if model == "gpt2" {
					c.Dropout = 0.1
					policies = append(policies, "full:h.0;selective:h.1")
				}
				c.Zero = 0
				want := runOf(t, c)
				for zero := range 4 {
					for _, policy := range inTurn(zero+ranks+accum/2, policies) {
						c.Zero, c.Recompute = zero, policy
						got := runOf(t, c)
						require.Equal(t, want.losses, got.losses, "%s, %d ranks, accum %d, stage %d, %s", model, ranks, accum, zero, policy)
						require.Equal(t, want.sha, got.sha, "%s, %d ranks, accum %d, stage %d, %s", model, ranks, accum, zero, policy)
					}
				}
				c.Recompute = ""
			}
		}
	}
}

// Placements of the grid: each class alone in each tier, and together.
var placements = []string{
	"optimizer=host", "optimizer=disk", "parameters=host", "parameters=disk", "gradients=host", "gradients=disk", "activations=host", "activations=disk",
	"optimizer=host,parameters=host,gradients=host,activations=host",
	"optimizer=disk,parameters=disk,gradients=disk,activations=disk",
	"optimizer=disk,parameters=host", "optimizer=host,gradients=disk,activations=disk", "parameters=disk,gradients=host",
}

// inTurn returns one of the values, a different one each turn, or all with SPILLWAY_LONG=all.
func inTurn[T any](turn int, values []T) []T {
	if long.All() {
		return values
	}
	return values[turn%len(values):][:1]
}

// stagePairs are used in turn in tests that are too slow with all stages. Two consecutive turns
// cover all four.
var stagePairs = [][]int{{0, 2}, {1, 3}}

// stagesInTurn returns two stages, the other two at the next turn, or all with SPILLWAY_LONG=all.
func stagesInTurn(turn int) (list []int) {
	for _, pair := range inTurn(turn, stagePairs) {
		list = append(list, pair...)
	}
	return list
}

// TestOffloadGivesTheSameBits checks that no combination of stage, placement and recomputation
// changes a bit at a given number of ranks. Accumulation (1 and 3), clipping (on and off) and
// prefetch (0 to 2) vary too. runOf checks that touched memory equals the plan in all three spaces.
// By default it runs every other placement at each number of ranks. Each placement has one stage and
// one recomputation policy in turn; SPILLWAY_LONG=all runs all combinations.
func TestOffloadGivesTheSameBits(t *testing.T) {
	t.Parallel()
	turn := 0
	for _, ranks := range []int{1, 2, 3} {
		want := map[string]outcome{}
		for i, placement := range placements {
			if !long.On() && (i+ranks)%2 == 0 {
				continue
			}
			for _, zero := range inTurn(i+i/2+ranks, []int{0, 1, 2, 3}) {
				c := tiny("gpt2")
				c.Ranks, c.Steps, c.Reproducible, c.Dropout = ranks, 2, true, 0.1
				c.Accum = 1 + 2*((turn/3)%2)
				c.Clip = float64((turn / 2) % 2)
				key := fmt.Sprint(c.Accum, c.Clip)
				if _, ok := want[key]; !ok {
					c.Zero = 0
					want[key] = runOf(t, c)
				}
				c.Zero, c.Prefetch, c.Offload, c.Disk = zero, turn%3, placement, t.TempDir()
				c.offloadChunk = []int64{0, 1024, 3072}[(turn/2)%3]
				for _, policy := range inTurn(turn+i, []string{"none", "full", "selective"}) {
					c.Recompute = policy
					got := runOf(t, c)
					at := fmt.Sprintf("%d ranks, stage %d, accum %d, clip %g, prefetch %d, chunk %d, recompute %s, %s", ranks, zero, c.Accum, c.Clip, c.Prefetch, c.offloadChunk, c.Recompute, placement)
					require.Equal(t, want[key].losses, got.losses, at)
					require.Equal(t, want[key].sha, got.sha, at)
				}
				turn++
			}
		}
	}
}

// TestOffloadEveryOptimizer checks offloading with a Llama, every optimizer, frozen parameters and
// held-out data.
func TestOffloadEveryOptimizer(t *testing.T) {
	t.Parallel()
	for i, name := range []string{"adamw", "sgd", "lamb", "lars", "larc", "novograd", "muon"} {
		for _, ranks := range inTurn(i, []int{1, 2}) {
			c := tiny("llama-untied")
			c.Ranks, c.Steps, c.Optimizer, c.Clip, c.Zero = ranks, 3, name, 1, 0
			c.Freeze = []string{"model.layers.0.*"}
			c.EvalData, c.EvalSteps = c.Data, 2
			want := runOf(t, c)
			for j, placement := range placements[8:] {
				if !long.All() && (i/2+j)%2 == 1 {
					continue
				}
				c.Zero, c.Offload, c.Disk = (i+ranks)%4, placement, t.TempDir()
				c.offloadChunk = 2048 * int64(i%2)
				got := runOf(t, c)
				require.Equal(t, want.losses, got.losses, "%s, %d ranks, %s", name, ranks, placement)
				require.Equal(t, want.sha, got.sha, "%s, %d ranks, %s", name, ranks, placement)
			}
		}
	}
}

// TestOffloadMovesTheClass checks that an offloaded class needs no device memory, and needs the
// same number of bytes in its new space.
func TestOffloadMovesTheClass(t *testing.T) {
	t.Parallel()
	for zero := range 4 {
		base := tiny("gpt2")
		base.Ranks, base.Zero = 2, zero
		plain, err := base.planned().Plan(t.Context())
		require.NoError(t, err)
		on := &plain.Layout.Spaces[graph.Device].ClassPeak
		for flag, class := range map[string]graph.Class{"optimizer": graph.Optimizer, "parameters": graph.Parameters, "gradients": graph.Gradients} {
			for tier, space := range map[string]graph.Space{"host": graph.Host, "disk": graph.Disk} {
				c := base
				c.Offload = flag + "=" + tier
				p, err := c.planned().Plan(t.Context())
				require.NoError(t, err)
				require.Zero(t, p.Layout.Spaces[graph.Device].ClassPeak[class], c.Offload)
				require.Equal(t, on[class], p.Layout.Spaces[space].ClassPeak[class], "%s at stage %d", c.Offload, zero)
				require.Less(t, p.Layout.Spaces[graph.Device].Peak, plain.Layout.Spaces[graph.Device].Peak+on[class], c.Offload)
			}
		}
	}
}

// TestCapsOfAllTiersAreWalls checks that a run fits with caps equal to the plan's peaks, and that
// one byte less in any space is refused.
func TestCapsOfAllTiersAreWalls(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Zero, c.Steps, c.Disk = 2, 3, 1, t.TempDir()
	c.Recompute, c.Offload = "full", "optimizer=disk,parameters=host,activations=host"
	p, err := c.planned().Plan(t.Context())
	require.NoError(t, err)
	for space, limit := range []*int64{&c.DeviceMemory, &c.HostMemory, &c.DiskMemory} {
		*limit = p.Layout.Spaces[space].Peak + p.Config.Outside[space]
	}
	runOf(t, c)
	for space, limit := range []*int64{&c.DeviceMemory, &c.HostMemory, &c.DiskMemory} {
		*limit--
		_, err := c.start(context.Background())
		require.ErrorContains(t, err, "does not fit")
		require.ErrorContains(t, err, graph.Space(space).String())
		*limit++
	}
}

// TestResumeAcrossPlacements checks that a checkpoint written with states on disk resumes with
// states on the device, and the reverse, with the same bits.
func TestResumeAcrossPlacements(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Steps, c.Disk = 2, 4, t.TempDir()
	want := runOf(t, c)
	for _, placement := range [][2]string{{placements[9], ""}, {"", placements[9]}, {placements[8], placements[4]}} {
		c.Checkpoint, c.Resume = t.TempDir(), false
		c.Steps, c.Offload = 2, placement[0]
		runOf(t, c)
		c.Steps, c.Offload, c.Resume = 4, placement[1], true
		got := runOf(t, c)
		require.Equal(t, want.losses[2:], got.losses)
		require.Equal(t, want.sha, got.sha)
	}
}

func TestDiskNeedsAFolder(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Offload = "optimizer=disk"
	_, err := c.start(context.Background())
	require.ErrorContains(t, err, "Config.Disk DIR")
	for text, want := range map[string]string{"optimizer": "CLASS=host", "optimizer=tape": `"tape" is not a place`, "weights=host": `class "weights"`} {
		c.Offload = text
		_, err = c.start(context.Background())
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "Config.Offload")
	}
}

// TestOffloadOfPlannedPrograms only plans: with 16-bit types and with shard groups, every placement
// must give a valid layout.
func TestOffloadOfPlannedPrograms(t *testing.T) {
	t.Parallel()
	for i, precision := range []string{"bf16", "fp16", "fp32"} {
		for _, placement := range placements {
			c := tiny("gpt2")
			c.Ranks, c.Precision, c.Zero, c.Offload, c.Recompute = 4, precision, i+1, placement, "full"
			if precision == "fp32" {
				c.ShardSize = 2
			}
			p, err := c.planned().Plan(t.Context())
			require.NoError(t, err, "%s, %s", precision, placement)
			require.NoError(t, layouts.Check(p.Program, p.Layout), "%s, %s", precision, placement)
		}
	}
}

// TestOffloadWithinGroups checks replicated shard groups with the placements that combine classes.
// By default each stage has every other placement.
func TestOffloadWithinGroups(t *testing.T) {
	t.Parallel()
	for zero := 1; zero < 4; zero++ {
		c := tiny("gpt2")
		c.Ranks, c.ShardSize, c.Steps, c.Zero, c.Clip = 4, 2, 2, zero, 0.5
		want := runOf(t, c)
		for i, placement := range placements[8:] {
			if !long.On() && (i+zero)%2 == 1 {
				continue
			}
			c.Offload, c.Disk, c.Recompute, c.offloadChunk = placement, t.TempDir(), "full", 1024
			got := runOf(t, c)
			require.Equal(t, want.losses, got.losses, "stage %d, %s", zero, placement)
			require.Equal(t, want.sha, got.sha, "stage %d, %s", zero, placement)
		}
	}
}

// TestOffloadGeneratesTheSameText checks that evaluation and generation with offloaded parameters
// give the same text. No operation may write outside its declared outputs.
func TestOffloadGeneratesTheSameText(t *testing.T) {
	t.Parallel()
	text := func(offload string) string {
		c := tiny("gpt2")
		c.Ranks, c.Steps, c.Generate, c.checkWrites = 2, 1, true, offload != ""
		c.EvalData, c.EvalSteps = c.Data, 1
		c.Offload, c.Disk, c.Recompute = offload, t.TempDir(), "full"
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		defer func() { require.NoError(t, tr.Close()) }()
		require.NoError(t, tr.Run(context.Background(), nil))
		out, err := tr.Generate(context.Background(), "the", long.Or(6, 12), Sampling{Temperature: 1, Seed: 1})
		require.NoError(t, err)
		return out
	}
	want := text("")
	list := placements[8:]
	if !long.All() {
		list = list[:2] // all on the host, and all on disk
	}
	for _, placement := range list {
		require.Equal(t, want, text(placement), placement)
	}
}
