package fsdp_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/zero"
)

// These tests compare memory and communication of plans with the ZeRO paper's formulas (Rajbhandari
// et al., SC 2020), as equalities. The formulas use only the forward program's parameters and
// units, not the code under test.

var models = map[string]model.Config{
	"gpt2 tied": {Family: model.GPT2, Layers: 3, Width: 40, Heads: 4, Vocab: 97, Positions: 32, TiedHead: true},
	// No tensor's size is a multiple of 256, so that every tensor is padded.
	"gpt2 odd":     {Family: model.GPT2, Layers: 2, Width: 18, Heads: 3, FFN: 31, Vocab: 101, Positions: 17},
	"llama tied":   {Family: model.Llama, Layers: 2, Width: 32, Heads: 4, KVHeads: 2, FFN: 56, Vocab: 61, Positions: 32, TiedHead: true},
	"llama untied": {Family: model.Llama, Layers: 4, Width: 24, Heads: 2, KVHeads: 1, FFN: 40, Vocab: 61, Positions: 32, QKVBias: true},
	"mlp":          {Family: model.MLP, Inputs: 19, Hidden: []int{33, 21}, Classes: 7},
	"cnn":          {Family: model.CNN, Height: 8, ImgWidth: 8, Chans: 3, Hidden: []int{5, 6}, Classes: 4},
}

var worlds = []int{1, 2, 3, 4, 5, 7, 8}

const fp32 = 4 // bytes

// unitSize holds a unit's data that the formulas need.
type unitSize struct {
	name      string
	tensors   []int64 // elements of each parameter
	elems     int64
	trainable bool
}

// unitsOf lists a model's units. The trainable and the frozen parameters of a unit are two entries,
// because they are gathered and reduced separately.
func unitsOf(p *graph.Program, frozen func(name string) bool) (list []unitSize) {
	for _, kind := range []bool{true, false} {
		for u := range p.Units {
			s := unitSize{name: p.Units[u].Name, trainable: kind}
			for _, prm := range p.Params {
				if prm.Unit == u && frozen(prm.Name) != kind {
					s.tensors = append(s.tensors, prm.Elems())
					s.elems += prm.Elems()
				}
			}
			if s.elems > 0 {
				list = append(list, s)
			}
		}
	}
	return list
}

func up(n, to int64) int64 { return (n + to - 1) / to * to }

// flat returns the length of a unit's flat parameter in elements: each tensor and each shard starts
// at a multiple of 256.
func (u unitSize) flat(ranks int) int64 {
	if u.whole(ranks) {
		odd := int64(ranks)
		for odd%2 == 0 {
			odd /= 2
		}
		return up(u.end(), 256*odd)
	}
	return up(u.end(), 256*int64(ranks))
}

func (u unitSize) end() (n int64) {
	for _, t := range u.tensors {
		n = up(n+t, 256)
	}
	return n
}

// whole reports whether a unit has fewer than 256 elements for each rank. Such a unit is not
// sharded or gathered.
func (u unitSize) whole(ranks int) bool { return u.end() < 256*int64(ranks) }

func buildPlan(t testing.TB, c model.Config, cfg plan.Config) *plan.Plan {
	t.Helper()
	seq := c.Positions
	if seq == 0 {
		seq = 1 // a classifier's
	}
	p, err := model.Build(c, model.Train, 2, seq)
	require.NoError(t, err)
	cfg.Target, cfg.Verify = graph.CPUTarget(), true
	if cfg.Accum == 0 {
		cfg.Accum = 1
	}
	if cfg.Optimizer.Name == "" {
		cfg.Optimizer = zero.Optimizer{Name: "adamw", Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, Trust: 0.001}
	}
	out, err := plan.Build(plan.Forward{Train: p}, cfg)
	require.NoError(t, err)
	return out
}

func forwardUnits(t testing.TB, c model.Config, frozen func(string) bool) []unitSize {
	seq := c.Positions
	if seq == 0 {
		seq = 1
	}
	p, err := model.Build(c, model.Train, 2, seq)
	require.NoError(t, err)
	return unitsOf(p, frozen)
}

// stateBytes holds K of the paper in fp32: the bytes of optimizer states per parameter, and, for
// states with one element per tensor, the bytes per parameter tensor.
var stateBytes = map[string][2]int64{
	"adamw": {8, 0}, "lamb": {8, 0}, // two moments
	"sgd": {4, 0}, "lars": {4, 0}, "larc": {4, 0}, // momentum
	"novograd": {4, 4}, // a first moment an element, a second one a tensor
}

// Units with less than 256 elements a rank are not sharded at any stage; N below applies to the
// others. Section 5 and figure 1: with Ψ trainable and Φ frozen parameters in fp32 over N ranks, a
// rank holds
// in fp32 over N ranks,
//
//	stage   parameters   gradients   optimizer
//	0       4(Ψ+Φ)       4Ψ          KΨ
//	1       4(Ψ+Φ)       4Ψ          KΨ/N
//	2       4(Ψ+Φ)       4Ψ/N        KΨ/N
//	3       4(Ψ+Φ)/N     4Ψ/N        KΨ/N
//
// where /N rounds up to an element of each tensor or state. Alignment and equal shards add bytes of
// class padding, which is not counted here.
func TestMemoryByFormula(t *testing.T) {
	for name, c := range models {
		for optimizer, k := range stateBytes {
			if optimizer != "adamw" && name != "gpt2 odd" {
				continue // an optimizer's states do not depend on the model
			}
			for _, n := range worlds {
				for stage := range 4 {
					title := fmt.Sprintf("%s/%s/%d ranks/stage %d", name, optimizer, n, stage)
					if !long.Keep(title, 4) {
						continue
					}
					t.Run(title, func(t *testing.T) {
						none := func(string) bool { return false }
						checkMemory(t, c, optimizer, k, n, stage, nil, none)
					})
				}
			}
		}
	}
}

func TestMemoryByFormulaWithFrozenParameters(t *testing.T) {
	for name, pattern := range map[string]string{"gpt2 tied": "h.0.*", "gpt2 odd": "*.bias", "llama untied": "model.embed_tokens.weight", "llama tied": "*q_proj*", "cnn": "layer.0.*"} {
		for _, n := range worlds {
			for stage := range 4 {
				title := fmt.Sprintf("%s without %s/%d ranks/stage %d", name, pattern, n, stage)
				if !long.Keep(title, 4) {
					continue
				}
				t.Run(title, func(t *testing.T) {
					checkMemory(t, models[name], "adamw", stateBytes["adamw"], n, stage, []string{pattern}, matcher(pattern))
				})
			}
		}
	}
}

// matcher supports patterns with stars at their ends only.
func matcher(pattern string) func(string) bool {
	core := strings.Trim(pattern, "*")
	return func(name string) bool {
		switch {
		case strings.HasPrefix(pattern, "*") && strings.HasSuffix(pattern, "*"):
			return strings.Contains(name, core)
		case strings.HasPrefix(pattern, "*"):
			return strings.HasSuffix(name, core)
		case strings.HasSuffix(pattern, "*"):
			return strings.HasPrefix(name, core)
		}
		return name == pattern
	}
}

func checkMemory(t *testing.T, c model.Config, optimizer string, k [2]int64, ranks, stage int, freeze []string, frozen func(string) bool) {
	p := buildPlan(t, c, plan.Config{Ranks: ranks, Stage: zero.Stage(stage), Prefetch: 1, Freeze: freeze,
		Optimizer: zero.Optimizer{Name: optimizer, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Trust: 0.001}})
	n := int64(ranks)
	var psi, phi, tensors int64
	var small, smallFrozen int64 // those of them in units that are not sharded
	units := forwardUnits(t, c, frozen)
	for _, u := range units {
		if u.trainable {
			psi += u.elems
			tensors += int64(len(u.tensors))
		} else {
			phi += u.elems
		}
		if u.whole(ranks) && u.trainable {
			small += u.elems
		} else if u.whole(ranks) {
			smallFrozen += u.elems
		}
	}
	over := func(elems, small int64, sharded bool) int64 { // elements that a rank holds
		if sharded {
			return (elems-small+n-1)/n + small
		}
		return elems
	}
	use := p.Layout.Spaces[graph.Device]
	require.Equal(t, fp32*over(psi+phi, small+smallFrozen, stage >= 3), use.ClassPeak[graph.Parameters], "parameters of Ψ=%d Φ=%d", psi, phi)
	require.Equal(t, fp32*over(psi, small, stage >= 2), use.ClassPeak[graph.Gradients], "gradients of Ψ=%d", psi)
	// The optimizer has k[0]/4 flat states of 4 bytes per element. States of one element per tensor
	// are not sharded.
	require.Equal(t, k[0]/fp32*fp32*over(psi, small, stage >= 1)+k[1]*tensors, use.ClassPeak[graph.Optimizer], "optimizer states of Ψ=%d", psi)

	// Padding of buffers that live for the run: flat lengths minus the sizes above.
	var want, got int64
	for _, u := range units {
		part := func(sharded bool) int64 {
			if sharded && !u.whole(ranks) {
				return u.flat(ranks) / n
			}
			return u.flat(ranks)
		}
		want += fp32 * part(stage >= 3 && ranks > 1)
		if u.trainable {
			want += k[0]*part(stage >= 1 && ranks > 1) + k[1]*int64(len(u.tensors))
		}
	}
	want -= use.ClassPeak[graph.Parameters] + use.ClassPeak[graph.Optimizer]
	for i := range p.Program.Buffers {
		if b := &p.Program.Buffers[i]; b.View == nil && p.Layout.Offset[i] >= 0 && b.Life == graph.LifeRun && b.Space == graph.Device && b.Class != graph.Inputs {
			got += b.Pad
		}
	}
	require.Equal(t, want, got, "padding of resident flat parameters and states")

	for sp, use := range p.Layout.Spaces {
		var sum int64
		for class, n := range use.ByClass {
			require.GreaterOrEqual(t, n, int64(0), "%s of %s", graph.Class(class), graph.Space(sp))
			require.LessOrEqual(t, n, use.ClassPeak[class], "%s of %s", graph.Class(class), graph.Space(sp))
			sum += n
		}
		require.Equal(t, use.Peak, sum, "classes add up to the peak of %s", graph.Space(sp))
	}
}

// The paper's example (figure 1): mixed-precision Adam with 7.5 billion parameters over 64 ranks
// needs 120, 31.4, 16.6 and 1.9 GB on each rank at stages 0 to 3.
func TestThePapersExample(t *testing.T) {
	for stage, want := range []float64{120e9, 31.4e9, 16.6e9, 1.88e9} {
		require.InEpsilon(t, want, zero.Stage(stage).ModelStateBytes(7.5e9, 64, 2, 2, 12), 0.005, "stage %d", stage)
	}
}

// gathersOf returns how often a micro-step gathers a unit: the number of stretches of operations
// that use its weights, derived from the architecture. Forward goes up, backward down:
//
//	embedding, positions   once: backward needs no weight, only the gradient
//	blocks, final norm     twice: forward, and backward for the input's gradient
//	head                   once: its forward and backward are adjacent
//	tied head              the embedding is then used twice: at the bottom, and at the top
//	first of a classifier  once: nobody wants the gradient of the input
//	last of a classifier   once, as a head
func gathersOf(c model.Config, unit string, layer, layers int) int64 {
	switch {
	case unit == "embed" && c.TiedHead:
		return 2
	case unit == "embed", unit == "pos", unit == "head":
		return 1
	case strings.HasPrefix(unit, "layer.") && (layer == 0 || layer == layers-1):
		return 1
	}
	return 2
}

// joined reports whether the forward's and the backward's use of a unit are one stretch. They are
// if nothing used between them is gathered: neither the units above, nor a tied embedding at the
// top.
func joined(c model.Config, unit string, units []unitSize, halves []unitSize, ranks int) bool {
	small := func(name string) bool {
		return !slices.ContainsFunc(halves, func(h unitSize) bool { return h.name == name && !h.whole(ranks) })
	}
	at := slices.IndexFunc(units, func(u unitSize) bool { return u.name == unit })
	for _, u := range units[at+1:] {
		if !small(u.name) {
			return false
		}
	}
	return !c.TiedHead || unit == "embed" || small("embed")
}

// Section 7 and its appendix: data parallel training and stages 1 and 2 send 2Ψ a rank and step,
// stage 3 sends 3Ψ, each times (N−1)/N for a ring. Here each collective moves its unit's padded
// flat parameter F:
//
//	stage 0   all-reduce = 2F(N−1)/N after the last micro-step
//	stage 1   reduce-scatter as often as stage 0's, and all-gather once: F(N−1)/N each
//	stage 2   reduce-scatter every micro-step, all-gather once
//	stage 3   reduce-scatter and the gathers of gathersOf every micro-step
//
// With Reproducible, every stage exchanges the leaves of each micro-step, which sends as much as a
// reduce-scatter. Stage 0 gathers the sum once.
//
// The loss and the exact accumulators of norms are not counted.
//
// A unit of less than 256 elements a rank is not sharded. It is all-reduced as often as its stage
// reduces and never gathered. With Reproducible it is padded and exchanged like other units.
//
// The frozen parameters of a block are gathered separately, as often as their own uses require.
// They are not reduced or updated.
func TestCommunicationByFormula(t *testing.T) {
	for name, c := range models {
		for _, n := range worlds {
			for _, accum := range []int{1, 2, 5} {
				for _, reproducible := range []bool{false, true} {
					for stage := range 4 {
						if (accum == 5 || reproducible) && n%3 != 2 {
							continue // the volume is linear in accum and equal to the sum over micro-steps
						}
						prefetch := []int{0, 1, 9}[(n+accum+stage)%3] // moves gathers, adds none
						for _, freeze := range frozenColumns[c.Family] {
							if freeze.pattern != "" && (n%3 != 2 || accum > 2 || reproducible) {
								continue // only 2, 5 and 8 ranks, and 1 or 2 micro-batches
							}
							title := fmt.Sprintf("%s, %d ranks, accum %d, reproducible %v, stage %d, prefetch %d, frozen %q", name, n, accum, reproducible, stage, prefetch, freeze.pattern)
							if !long.Keep(title, 8) {
								continue
							}
							cfg := plan.Config{Ranks: n, Stage: zero.Stage(stage), Prefetch: prefetch, Accum: accum, Reproducible: reproducible}
							if freeze.pattern != "" {
								cfg.Freeze = []string{freeze.pattern}
							}
							frozen := func(name string) bool { ok, _ := graph.MatchName(freeze.pattern, name); return ok }
							var want int64
							whole := forwardUnits(t, c, func(string) bool { return false })
							units := forwardUnits(t, c, frozen)
							for _, u := range units {
								layer := slices.IndexFunc(whole, func(w unitSize) bool { return w.name == u.name })
								flat := u.flat(n)
								if reproducible {
									flat = up(flat, 256*int64(n))
								}
								each := fp32 * flat / int64(n) * int64(n-1)
								k, gathers := int64(accum), gathersOf(c, u.name, layer, len(whole))
								if gathers == 2 && joined(c, u.name, whole, units, n) {
									gathers = 1
								}
								if u.whole(n) {
									if !u.trainable {
										continue
									}
									if reproducible {
										want += each * (k + 1)
									} else {
										want += 2 * fp32 * flat * int64(n-1) / int64(n) * [...]int64{1, 1, k, k}[stage]
									}
									continue
								}
								if !u.trainable {
									if stage == 3 {
										want += each * k * min(gathers, freeze.gathers)
									}
									continue
								}
								below := [2]int64{2, 2} // stages 0 and 1
								if reproducible {
									below = [2]int64{k + 1, k + 1}
								}
								want += each * [...]int64{below[0], below[1], k + 1, k + gathers*k}[stage]
							}
							require.Equal(t, want, buildPlan(t, c, cfg).CommBytes, title)
						}
					}
				}
			}
		}
	}
}

// frozenColumns lists the parameters frozen in TestCommunicationByFormula and how often a
// micro-step gathers them. The forward needs frozen weights, scales and biases; the backward needs
// weights and scales for the gradient of the input.
var frozenColumns = map[model.Family][]struct {
	pattern string
	gathers int64
}{
	model.GPT2:  {{"", 0}, {"h.*.ln_*", 2}, {"h.*.mlp.*", 2}, {"*.bias", 1}},
	model.Llama: {{"", 0}, {"model.layers.*layernorm*", 2}, {"*.q_proj.weight", 2}},
	model.MLP:   {{"", 0}, {"*.bias", 1}},
	model.CNN:   {{"", 0}, {"*.bias", 1}},
}

// On a deep model padding and the first and last units are negligible, and the sums approach the
// paper's 2Ψ and 3Ψ.
func TestCommunicationNearsTheTextbook(t *testing.T) {
	c := model.Config{Family: model.Llama, Layers: 24, Width: 512, Heads: 8, FFN: 1408, Vocab: 256, Positions: 64}
	for stage := range 4 {
		for _, n := range []int{2, 4, 8} {
			if n != 2<<(stage%3) && !long.On() {
				continue
			}
			p := buildPlan(t, c, plan.Config{Ranks: n, Stage: zero.Stage(stage), Prefetch: 1})
			var psi int64
			for _, prm := range p.Program.Params {
				psi += prm.Elems()
			}
			require.InEpsilon(t, fp32*textbookVolume(zero.Stage(stage), float64(psi), float64(n)), float64(p.CommBytes), 0.01, "stage %d at %d ranks", stage, n)
		}
	}
}

// textbookVolume is the paper's formula (section 7) for the elements that a rank sends in a step:
// 2Ψ for stages 0 to 2 (all-reduce, or reduce-scatter and all-gather), 3Ψ for stage 3, each times
// (N−1)/N for N ranks, where Ψ is the number of parameters.
func textbookVolume(s zero.Stage, params, ranks float64) float64 {
	n := 2.0
	if s.ShardsParams() {
		n = 3
	}
	return n * params * (ranks - 1) / ranks
}
