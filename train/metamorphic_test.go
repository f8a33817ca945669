package train

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/search"
)

// Variables of the metamorphic tests: a run with random options must give the bits of the same run
// at stage 0. SPILLWAY_TEST_SEED repeats the seed that a failure prints. SPILLWAY_TEST_CASES sets
// the number of cases.
const (
	seedVariable  = "SPILLWAY_TEST_SEED"
	casesVariable = "SPILLWAY_TEST_CASES"
	levelVariable = "SPILLWAY_SIMD"
)

// randomModel writes the config.json of a random model and random tokens of its vocabulary into
// dir.
func randomModel(t testing.TB, r *rand.Rand, dir string) request {
	t.Helper()
	heads := 1 + r.IntN(4)
	width := heads * 2 * (1 + r.IntN(9)) // rotary positions rotate pairs
	vocab, positions := 2+r.IntN(300), 2+r.IntN(40)
	var shape map[string]any
	if r.IntN(2) == 0 {
		shape = map[string]any{"model_type": "gpt2", "n_layer": 1 + r.IntN(3), "n_head": heads, "n_embd": width, "vocab_size": vocab, "n_positions": positions,
			"n_inner": 1 + r.IntN(3*width), "tie_word_embeddings": r.IntN(2) == 0}
	} else {
		kv := heads
		for kv > 1 && (r.IntN(2) == 0 || heads%kv != 0) {
			kv--
			for heads%kv != 0 {
				kv--
			}
		}
		shape = map[string]any{"model_type": "llama", "num_hidden_layers": 1 + r.IntN(3), "num_attention_heads": heads, "num_key_value_heads": kv, "hidden_size": width,
			"intermediate_size": 1 + r.IntN(3*width), "vocab_size": vocab, "max_position_embeddings": positions, "tie_word_embeddings": r.IntN(2) == 0}
	}
	text, err := json.Marshal(shape)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), text, 0o644))
	tokens := make([]byte, 2*(positions+1+r.IntN(4000)))
	for i := 0; i < len(tokens); i += 2 {
		binary.LittleEndian.PutUint16(tokens[i:], uint16(r.IntN(vocab)))
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "tokens.bin"), tokens, 0o644))
	c := request{Config: config.Default()}
	c.Model, c.Data = dir, filepath.Join(dir, "tokens.bin")
	c.Seq = 1 + r.IntN(positions)
	if shape["model_type"] == "gpt2" && r.IntN(3) == 0 {
		c.Dropout = 0.5 * r.Float64()
	}
	return c
}

// randomCase returns a random run: all options that may change its bits.
func randomCase(t testing.TB, seed uint64, dir string) request {
	r := rand.New(rand.NewPCG(seed, 1))
	pick := func(names ...string) string { return names[r.IntN(len(names))] }
	c := randomModel(t, r, dir)
	c.Seed, c.Steps, c.poison = int64(r.Uint64()>>1), 2, true
	c.Batch, c.Accum, c.Ranks = 1+r.IntN(3), 1+r.IntN(4), 1+r.IntN(6)
	c.Order = pick("sequential", "shuffled")
	c.Optimizer = pick("adamw", "adamw", "sgd", "lamb", "lars", "larc", "novograd", "muon")
	c.LRSchedule = pick("constant", "cosine")
	if r.IntN(2) == 0 {
		c.Clip = 2 * r.Float64()
	}
	if c.Clip < 1e-3 {
		c.Clip = 0
	}
	if r.IntN(3) == 0 {
		p, err := c.planned().Plan(t.Context())
		require.NoError(t, err)
		for range 1 + r.IntN(4) {
			prm := p.Program.Params[r.IntN(len(p.Program.Params))].Name
			c.Freeze = append(c.Freeze, prm)
		}
	} else if r.IntN(3) == 0 {
		c.LoRA = lora.Options{Rank: 1 + r.IntN(9), Alpha: 1 + 9*r.Float64(), Targets: []string{pick("*", "*attn*", "*mlp*")}, Dropout: []float64{0, 0.2}[r.IntN(2)]}
		c.Base = pick("", "", "int8")
	}
	return c
}

// variant returns c with other random options that must not change any bit. It keeps the stage.
func variant(t testing.TB, r *rand.Rand, c request) request {
	c.Prefetch = []int{0, 1, 2, 5, 100}[r.IntN(5)]
	c.Threads = []int{0, 1, 2, 3, 7}[r.IntN(5)]
	c.Recompute = []string{"none", "none", "selective", "full", "full:h.0"}[r.IntN(5)]
	if r.IntN(2) == 0 {
		var parts []string
		for _, class := range []string{"optimizer", "parameters", "gradients", "activations"} {
			tiers := []string{"", "host", "disk", "host:40%", "host:30%+disk", "disk:55%"}
			if class == "activations" {
				tiers = tiers[:3]
			}
			if tier := tiers[r.IntN(len(tiers))]; tier != "" {
				parts = append(parts, class+"="+tier)
			}
		}
		c.Offload, c.Disk = strings.Join(parts, ","), scratch(t)
		c.offloadChunk = []int64{0, 1024, 5120}[r.IntN(3)]
	}
	switch r.IntN(4) {
	case 0:
		byBuffer(t, r, &c)
	case 1:
		auto(t, r, &c)
	}
	return c
}

// byBuffer recomputes and offloads random kinds of activations in some layers, as a search does.
func byBuffer(t testing.TB, r *rand.Rand, c *request) {
	c.Recompute = "none"
	m := cost.CPU(1, 1)
	spec, err := c.planned().Spec(m)
	require.NoError(t, err)
	taken := map[string]bool{}
	again, away, err := search.Mixed(spec, []graph.Space{graph.Host, graph.Disk}, m, func(kind string) float64 {
		if taken[kind] || r.IntN(3) != 0 {
			return 0
		}
		taken[kind] = true
		return r.Float64()
	})
	require.NoError(t, err)
	c.Recompute = again.String()
	if c.Offload == "" && away.Active() {
		c.Offload, c.Disk = away.String(), scratch(t)
	}
}

// auto sets Recompute auto and a random memory cap between the peaks of full and no recomputation.
func auto(t testing.TB, r *rand.Rand, c *request) {
	var peak [2]int64
	for i, policy := range []string{"none", "full"} {
		one := *c
		one.Recompute = policy
		p, err := one.planned().Plan(t.Context())
		require.NoError(t, err)
		peak[i] = p.Layout.Spaces[graph.Device].Peak
	}
	c.Recompute = "auto"
	c.DeviceMemory = max(peak[0], peak[1]) - int64(r.Float64()*float64(max(0, peak[0]-peak[1])))
}

func seedOf(t *testing.T) (first uint64, cases int) {
	cases = long.Or(1, 2)
	if testing.Short() {
		cases = 1
	}
	if n, err := strconv.Atoi(os.Getenv(casesVariable)); err == nil {
		cases = n
	}
	if text := os.Getenv(seedVariable); text != "" {
		n, err := strconv.ParseUint(text, 10, 64)
		require.NoError(t, err, seedVariable)
		return n, 1
	}
	return rand.Uint64() >> 1, cases
}

// overSeeds runs a test for each seed until one fails, and prints how to repeat that one.
func overSeeds(t *testing.T, one func(t *testing.T, seed uint64)) {
	first, cases := seedOf(t)
	for k := range cases {
		seed := first + uint64(k)
		t.Run("", func(t *testing.T) { one(t, seed) })
		if t.Failed() {
			t.Fatalf("repeat with %s=%d", seedVariable, seed)
		}
	}
}

func TestMetamorphic(t *testing.T) { overSeeds(t, metamorphic) }

func metamorphic(t *testing.T, seed uint64) {
	t.Logf("%s=%d", seedVariable, seed)
	c := randomCase(t, seed, t.TempDir())
	r := rand.New(rand.NewPCG(seed, 2))
	c.Precision = []string{"fp32", "fp32", "bf16", "fp16"}[r.IntN(4)] // at the current SIMD level: see TestLevelsGiveTheSameBits
	if r.IntN(4) == 0 {
		c.OnNonFinite = "skip"
	}
	describe := func(v request) string { return fmt.Sprintf("%s=%d: %+v", seedVariable, seed, v) }
	run := func(v request) outcome {
		before := runtime.GOMAXPROCS(1 + r.IntN(3))
		defer runtime.GOMAXPROCS(before)
		return runOf(t, v)
	}
	// With accumulation, stages 0 and 1 agree, and stages 2 and 3. Reproducible sums, which add
	// leaf by leaf, agree at all stages and numbers of ranks.
	for _, half := range []struct {
		reference    int
		reproducible bool
		stages       []int
	}{{0, false, []int{0, 1}}, {2, false, []int{2, 3}}, {2, true, []int{0, 1, 2, 3}}} {
		if c.Accum == 1 && half.reference == 2 && !half.reproducible {
			continue // same as stage 0
		}
		v := c
		v.Zero, v.Prefetch, v.Reproducible = half.reference, 1, half.reproducible
		want := run(v)
		if c.Accum == 1 && !half.reproducible {
			half.stages = []int{0, 1, 2, 3}
		}
		at := func(zero int) request {
			v := c
			v.Zero, v.Reproducible = zero, half.reproducible
			if half.reproducible {
				v.Ranks = oneOfDivisors(r, c.Ranks*c.Accum)
				v.Accum = c.Ranks * c.Accum / v.Ranks
			}
			return variant(t, r, v)
		}
		for _, zero := range half.stages {
			v := at(zero)
			got := run(v)
			require.Equal(t, want.losses, got.losses, describe(v))
			require.Equal(t, want.sha, got.sha, describe(v))
		}
		// Run and save one step as one variant, and the other step as another variant.
		v = at(half.stages[r.IntN(len(half.stages))])
		v.Checkpoint, v.SaveEvery, v.Keep = scratch(t), 1, 0
		require.Equal(t, want.sha, run(v).sha, describe(v))
		require.NoError(t, os.RemoveAll(filepath.Join(v.Checkpoint, "step-00000002")))
		folder := v.Checkpoint
		v = at(half.stages[r.IntN(len(half.stages))])
		v.Checkpoint, v.Resume = folder, true
		got := run(v)
		require.Equal(t, want.losses[1:], got.losses, describe(v))
		require.Equal(t, want.sha, got.sha, describe(v))
	}
}

// oneOfDivisors returns a random divisor of n, at most 12.
func oneOfDivisors(r *rand.Rand, n int) int {
	var list []int
	for d := 1; d <= min(n, 12); d++ {
		if n%d == 0 {
			list = append(list, d)
		}
	}
	return list[r.IntN(len(list))]
}

// TestLevelOutcome prints the outcome of a run for TestLevelsGiveTheSameBits.
func TestLevelOutcome(t *testing.T) {
	seed, err := strconv.ParseUint(os.Getenv(seedVariable), 10, 64)
	if os.Getenv(levelVariable) == "" || err != nil {
		t.Skip("for TestLevelsGiveTheSameBits, which runs it in processes of its own")
	}
	c := randomCase(t, seed, t.TempDir())
	o := runOf(t, c)
	fmt.Printf("outcome %s %s %v\n", level.Current(), o.sha, o.losses)
}

// TestLevelsGiveTheSameBits checks that all SIMD levels of this processor give the same bits. The
// level is fixed per process, so each level runs in its own process.
func TestLevelsGiveTheSameBits(t *testing.T) {
	if level.Best() == level.Portable {
		t.Skip("this processor has the portable level only")
	}
	if testing.Short() {
		t.Skip("starts processes")
	}
	exe, err := os.Executable()
	require.NoError(t, err)
	first, _ := seedOf(t)
	for seed := first; seed < first+2; seed++ {
		want := ""
		for l := level.Portable; l <= level.Best(); l++ {
			cmd := exec.Command(exe, "-test.run=^TestLevelOutcome$", "-test.timeout=100s")
			cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", seedVariable, seed), levelVariable+"="+l.String())
			text, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s=%d at %s: %s", seedVariable, seed, l, text)
			_, line, ok := strings.Cut(string(text), "outcome "+l.String()+" ")
			require.True(t, ok, "%s", text)
			line, _, _ = strings.Cut(line, "\n")
			if want == "" {
				want = line
			}
			require.Equal(t, want, line, "%s=%d at %s", seedVariable, seed, l)
		}
	}
}

// TestFrozenParameters checks that frozen parameters have no gradient and no optimizer state and
// keep their values. No unit below the lowest trainable unit may have backward operations.
func TestFrozenParameters(t *testing.T) {
	for _, model := range []string{"gpt2", "llama-tied", "llama-untied"} {
		frozen := []string{"wte.weight", "wpe.weight", "h.0.*", "h.1.ln_1.*"}
		bottom := map[string]bool{"embed": true, "pos": true, "h.0": true, "embed.frozen": true, "pos.frozen": true, "h.0.frozen": true}
		if model != "gpt2" {
			frozen = []string{"model.embed_tokens.weight", "model.layers.0.*", "model.layers.1.input_layernorm.*"}
		}
		for zero := range 4 {
			c := tiny(model)
			c.Ranks, c.Zero, c.Steps, c.Freeze, c.WeightDecay = 3, zero, 3, frozen, 0.1
			tr, err := c.start(context.Background())
			require.NoError(t, err)
			p := tr.Plan().Program
			before, trained := map[string][]float32{}, 0
			for i := range p.Params {
				prm := &p.Params[i]
				_, v, err := tr.Parameter(prm.Name)
				require.NoError(t, err)
				before[prm.Name] = v
				u := &p.Units[prm.Unit]
				require.Equal(t, prm.Frozen, u.Frozen, "%s: a unit is frozen or it is not", prm.Name)
				if prm.Frozen {
					require.Equal(t, graph.NoBuf, prm.Grad, prm.Name)
					require.Empty(t, u.States, prm.Name)
				} else {
					trained++
					require.NotEmpty(t, u.States, prm.Name)
				}
			}
			require.Positive(t, trained)
			for i := range p.Sections {
				for j := range p.Sections[i].Phases {
					for _, op := range p.Sections[i].Phases[j].Ops {
						if op.Pass != graph.Backward || op.Unit < 0 {
							continue
						}
						name := p.Units[op.Unit].Name
						// A tied head is the embedding's second use: the gradient passes through
						// the head to earlier layers, but the embedding has none.
						if name == "embed" && model == "llama-tied" || name == "embed" && model == "gpt2" {
							require.NotEqual(t, graph.ReduceScatter, op.Kind, op.Name)
							continue
						}
						require.False(t, bottom[name], "%s: backward operation %s of unit %s", model, op.Name, name)
					}
				}
			}
			require.NoError(t, tr.Run(context.Background(), nil))
			for name, old := range before {
				_, now, err := tr.Parameter(name)
				require.NoError(t, err)
				matches := false
				for i := range p.Params {
					matches = matches || p.Params[i].Name == name && p.Params[i].Frozen
				}
				if matches {
					require.Equal(t, old, now, "%s moved, stage %d", name, zero)
				} else {
					require.NotEqual(t, old, now, "%s did not move, stage %d", name, zero)
				}
			}
			require.NoError(t, tr.Close())
		}
	}
}

// TestEverythingFrozen checks that a step with all parameters frozen changes no parameter and needs
// no memory for gradients or optimizer states.
func TestEverythingFrozen(t *testing.T) {
	for zero := range 4 {
		c := tiny("gpt2")
		c.Ranks, c.Zero, c.Steps, c.Freeze = 2, zero, 2, []string{"*"}
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		before, err := tr.ParamsSHA256()
		require.NoError(t, err)
		require.NoError(t, tr.Close())
		got := runOf(t, c)
		require.Equal(t, before, got.sha)
		require.Zero(t, tr.Plan().Layout.Spaces[graph.Device].ClassPeak[graph.Gradients])
		require.Zero(t, tr.Plan().Layout.Spaces[graph.Device].ClassPeak[graph.Optimizer])
	}
}
