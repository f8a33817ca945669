package precision_test

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/interp"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/zero"
)

const (
	batch, seq = 2, 8
	vocab      = 60
)

var gpt = model.Config{Family: model.GPT2, Layers: 1, Width: 16, Heads: 2, Vocab: vocab, Positions: seq, TiedHead: true, ResidDropout: 0.1}

// run executes a planned program in the interpreter. Its 16-bit arithmetic is the reference: widen
// to f32, compute, round once.
type run struct {
	t    *testing.T
	p    *graph.Program
	w    *interp.World[float32]
	step int
}

func config(ranks, shards int, stage zero.Stage, prec precision.Precision) plan.Config {
	return plan.Config{Ranks: ranks, ShardSize: shards, Stage: stage, Accum: 1, Prefetch: 1, Clip: 1, Target: graph.CPUTarget(), Verify: true,
		Optimizer: zero.Optimizer{Name: "adamw", Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, Trust: 0.01}, Precision: prec}
}

func start(t *testing.T, c plan.Config) *run {
	f, err := model.Build(gpt, model.Train, batch, seq)
	require.NoError(t, err)
	pl, err := plan.Build(plan.Forward{Train: f}, c)
	require.NoError(t, err)
	r := &run{t: t, p: pl.Program, w: interp.New[float32](pl.Program)}
	require.NoError(t, r.w.Run("init"))
	for rank := range r.w.Ranks() {
		for i := range r.p.Params {
			prm := &r.p.Params[i]
			v := make([]float32, prm.Elems())
			switch prm.Init {
			case graph.InitNormal:
				num.FillNormal(v, prm.Std*5, 1, num.Stream(prm.Name), 0)
			case graph.InitOnes:
				for k := range v {
					v[k] = 1
				}
			}
			r.each(rank, i, func(state []float32, at int) { copy(state, v[at:]) })
		}
	}
	if r.p.Section("refresh") != nil {
		require.NoError(t, r.w.Run("refresh"))
	}
	return r
}

// each calls f for each part of a parameter's resident value on the rank, with the parameter's
// element at which it starts.
func (r *run) each(rank, param int, f func(state []float32, at int)) {
	u := &r.p.Units[r.p.Params[param].Unit]
	all, err := r.w.Floats(rank, u.Value.Buf)
	require.NoError(r.t, err)
	from := int64(0)
	if a := u.Value.Axis; a >= 0 {
		stride := 1
		for k := a + 1; k < len(r.p.Mesh); k++ {
			stride *= r.p.Mesh[k].Size
		}
		from = int64(rank/stride%r.p.Mesh[a].Size) * u.Value.Len
	}
	for _, s := range u.Segments {
		lo, hi := max(s.Flat, from), min(s.Flat+s.Len, from+u.Value.Len)
		if s.Param == param && lo < hi {
			f(all[lo-from:hi-from], int(s.Start+lo-s.Flat))
		}
	}
}

// values returns every parameter, gathered from all ranks.
func (r *run) values() [][]float32 {
	var all [][]float32
	for i := range r.p.Params {
		v := make([]float32, r.p.Params[i].Elems())
		for rank := range r.w.Ranks() {
			r.each(rank, i, func(state []float32, at int) { copy(v[at:], state) })
		}
		all = append(all, v)
	}
	return all
}

func (r *run) f64(rank int, id graph.BufID) []float64 {
	v, err := r.w.F64(rank, id)
	require.NoError(r.t, err)
	return v
}

// next trains one step with the given loss scale and returns the mean loss. Each rank has its own
// tokens, the same in every step.
func (r *run) next(lossScale float64) float64 {
	ranks := r.w.Ranks()
	count := float64(ranks * batch * seq * r.accum())
	for rank := range ranks {
		tokens, err := r.w.I32(rank, r.p.Port(graph.PortTokens))
		require.NoError(r.t, err)
		targets, err := r.w.I32(rank, r.p.Port(graph.PortTargets))
		require.NoError(r.t, err)
		for i := range tokens {
			tokens[i] = int32((i*7 + rank*31) % vocab)
			targets[i] = int32((i*7 + rank*31 + 7) % vocab)
		}
		h := r.f64(rank, r.p.Port(graph.PortHyper))
		clear(h)
		h[graph.HyperLR], h[graph.HyperInvCount], h[graph.HyperLossScale] = 3e-3, 1/count, lossScale
		h[graph.HyperBC1], h[graph.HyperBC2] = 1-math.Pow(0.9, float64(r.step+1)), 1-math.Pow(0.95, float64(r.step+1))
		key, err := r.w.I64(rank, r.p.Port(graph.PortKey))
		require.NoError(r.t, err)
		clear(key)
		key[graph.KeySeed], key[graph.KeyStep], key[graph.KeySample] = 1, int64(r.step), int64(rank*batch)
	}
	require.NoError(r.t, r.w.Run("step"))
	r.step++
	return r.f64(0, r.p.Port(graph.PortLoss))[0] / count
}

func (r *run) accum() int {
	n := 0
	for _, ph := range r.p.Section("step").Phases {
		if ph.Name != "update" {
			n += ph.Repeat
		}
	}
	return n
}

const steps = 6

func (r *run) losses(lossScale float64) (list []float64) {
	for range steps {
		list = append(list, r.next(lossScale))
	}
	return list
}

// Training in 16 bits learns, with losses close to those of fp32. All stages agree bit for bit, on
// one mesh axis and on two.
func TestMixedPrecisionFollowsFP32(t *testing.T) {
	want := start(t, config(4, 0, zero.Replicate, precision.FP32)).losses(1)
	require.Less(t, want[steps-1], want[0]-0.5, "fp32 learns: %v", want)
	for _, c := range []struct {
		prec  precision.Precision
		scale float64
		close float64 // relative error of a loss
	}{{precision.BF16, 1, 1e-2}, {precision.FP16, 1024, 2e-3}} {
		for _, shards := range []int{0, 2} {
			var first []float64
			var params [][]float32
			for stage := range zero.Stage(4) {
				r := start(t, config(4, shards, stage, c.prec))
				got := r.losses(c.scale)
				what := fmt.Sprintf("%v, stage %d, shards of %d", c.prec, stage, shards)
				if stage == 0 {
					first, params = got, r.values()
				}
				require.Equal(t, first, got, what)
				require.Equal(t, params, r.values(), what)
				for s := range want {
					require.InEpsilon(t, want[s], got[s], c.close, "%s, step %d: %v and %v", what, s+1, want, got)
				}
				require.NotEqual(t, want, got, what)
				r.copiesFollowMasters(what)
			}
			again, err := recompute.Parse("full")
			require.NoError(t, err)
			o := config(4, shards, zero.PartitionParams, c.prec)
			o.Recompute = again
			r := start(t, o)
			require.Equal(t, first, r.losses(c.scale), "%v, recomputed", c.prec)
			require.Equal(t, params, r.values(), "%v, recomputed", c.prec)
		}
	}
}

// copiesFollowMasters requires that the 16-bit parameters equal their rounded masters.
func (r *run) copiesFollowMasters(what string) {
	before := r.resident()
	require.NoError(r.t, r.w.Run("refresh"))
	require.Equal(r.t, before, r.resident(), what)
}

func (r *run) resident() (bits [][]uint16) {
	for rank := range r.w.Ranks() {
		for id := range r.p.Buffers {
			b := &r.p.Buffers[id]
			if b.View == nil && b.Class == graph.Parameters && b.DType != graph.F32 {
				v, err := r.w.U16(rank, graph.BufID(id))
				require.NoError(r.t, err)
				bits = append(bits, slices.Clone(v))
			}
		}
	}
	return bits
}

// Gradient accumulation in mixed precision learns, on one mesh axis and on two, also with gradients
// reduced in fp32. Stages 0 and 1 agree bit for bit, and so do stages 2 and 3. With Reproducible
// all stages agree.
func TestAccumulationInMixedPrecision(t *testing.T) {
	for _, reduce32 := range []bool{false, true} {
		for _, shards := range []int{0, 2} {
			if reduce32 && shards == 0 {
				continue // as in fp32, whose path the training tests cover
			}
			results := map[bool][4][]float64{}
			for _, reproducible := range []bool{false, true} {
				if reproducible && shards > 0 {
					continue // refused on two axes
				}
				var got [4][]float64
				for stage := range zero.Stage(4) {
					c := config(4, shards, stage, precision.BF16)
					c.Accum, c.Reproducible, c.Reduce32 = 3, reproducible, reduce32
					r := start(t, c)
					got[stage] = r.losses(1)
					require.Less(t, got[stage][steps-1], got[stage][0]-0.5)
				}
				results[reproducible] = got
			}
			what := fmt.Sprintf("reduce32 %v, shards of %d", reduce32, shards)
			plain := results[false]
			require.Equal(t, plain[0], plain[1], what)
			require.Equal(t, plain[2], plain[3], what)
			for stage := range 4 {
				require.Equal(t, results[true][0], results[true][stage], "%s, reproducible stage %d", what, stage)
			}
		}
	}
}

// Every optimizer changes the masters, keeps the 16-bit copies equal to them, and gives the same
// values at every stage.
func TestOptimizersInMixedPrecision(t *testing.T) {
	for _, name := range zero.OptimizerNames() {
		var want [][]float32
		for stage := range zero.Stage(4) {
			c := config(2, 0, stage, precision.BF16)
			c.Optimizer.Name = name
			r := start(t, c)
			before := r.values()
			r.next(1)
			r.next(1)
			r.copiesFollowMasters(name)
			require.NotEqual(t, before, r.values(), name)
			if stage == 0 {
				want = r.values()
			}
			require.Equal(t, want, r.values(), "%s, stage %d", name, stage)
		}
	}
}

// If one rank overflows, every rank skips the step and halves the loss scale. Parameters, masters
// and moments do not change, and the next step runs.
func TestOverflowSkipsTheStepOnEveryRank(t *testing.T) {
	for _, name := range []string{"adamw", "lamb", "novograd"} { // moments, norms by parameter, both
		for stage := range zero.Stage(4) {
			c := config(4, []int{0, 2}[stage%2], stage, precision.FP16)
			c.Optimizer.Name = name
			r := start(t, c)
			what := fmt.Sprintf("%s, stage %d", name, stage)
			r.next(1024)
			require.Equal(t, []float64{graph.InitialLossScale, 1}, r.f64(0, r.p.Port(graph.PortScale)), what)
			values, resident, states := r.values(), r.resident(), r.states()
			loss := r.next(1e30) // no f16 holds the gradients of that
			require.False(t, math.IsNaN(loss) || math.IsInf(loss, 0), "%s: the loss itself is not scaled", what)
			for rank := range r.w.Ranks() {
				require.Equal(t, []float64{graph.InitialLossScale / 2, 0}, r.f64(rank, r.p.Port(graph.PortScale)), what)
				flag, err := r.w.I32(rank, r.p.Port(graph.PortOverflow))
				require.NoError(t, err)
				require.Equal(t, []int32{1}, flag, "%s, rank %d", what, rank)
			}
			require.Equal(t, values, r.values(), what)
			require.Equal(t, resident, r.resident(), what)
			require.Equal(t, states, r.states(), what)
			r.next(1024)
			require.Equal(t, []float64{graph.InitialLossScale / 2, 1}, r.f64(3, r.p.Port(graph.PortScale)), what)
			require.NotEqual(t, values, r.values(), what)
		}
	}
}

func (r *run) states() (all [][]float32) {
	for rank := range r.w.Ranks() {
		for u := range r.p.Units {
			for _, s := range r.p.Units[u].States {
				v, err := r.w.Floats(rank, s.Buf)
				require.NoError(r.t, err)
				all = append(all, slices.Clone(v))
			}
		}
	}
	return all
}
