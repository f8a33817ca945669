package train

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/lora"
)

// withLoRA returns a run of a reference model with adapters on the given targets.
func withLoRA(model string, rank int, targets ...string) request {
	c := tiny(model)
	c.LoRA = lora.Options{Rank: rank, Alpha: 16, Targets: targets}
	c.LR = 1e-2
	return c
}

// blockTargets selects the linear layers of each model's blocks.
var blockTargets = map[string][]string{"gpt2": {"*.attn.*", "*.mlp.*"}, "llama-tied": {"*_proj.weight"}, "llama-untied": {"*.q_proj.*", "*.v_proj.*"}}

// firstA sets every A to the initial values of testdata/lora.py.
func firstA(t *testing.T, tr *Trainer) {
	t.Helper()
	p := tr.Plan().Program
	for i := range p.Params {
		if !strings.HasSuffix(p.Params[i].Name, lora.SuffixA) {
			continue
		}
		v := make([]float32, p.Params[i].Elems())
		for k := range v {
			v[k] = float32((float64(k*7919%1009)/1009*2 - 1) / math.Sqrt(float64(p.Params[i].Shape[1])))
		}
		require.NoError(t, tr.SetParameter(p.Params[i].Name, v))
	}
}

// TestLoRAFollowsPyTorch compares 20 losses with a plain LoRA in PyTorch (testdata/lora.py). The
// cases cover a tied head, grouped-query attention, weights of shape (in, out), and ranks 1, 8 and
// 64.
func TestLoRAFollowsPyTorch(t *testing.T) {
	t.Parallel()
	var want struct {
		Alpha, LR float64
		Cases     []struct {
			Model   string
			R       int
			Targets []string
			Losses  []float64
		}
	}
	text, err := os.ReadFile("../testdata/lora.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &want))
	require.Len(t, want.Cases, 9)
	for i, w := range want.Cases {
		c := withLoRA(w.Model, w.R, w.Targets...)
		c.LoRA.Alpha, c.LR = want.Alpha, want.LR
		if i%2 == 1 {
			c.Ranks, c.Batch = 2, 1
		}
		c.Zero = i % 4
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		firstA(t, tr)
		step := 0
		require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
			require.InEpsilon(t, w.Losses[step], float64(r.Loss), 1e-4, "%s, r %d, step %d", w.Model, w.R, r.Step)
			step++
			return nil
		}))
		require.Len(t, w.Losses, step)
		require.NoError(t, tr.Close())
	}
}

// TestLoRAGivesTheSameBits checks that adapters give the bits of stage 0 at every stage, offloaded
// to host or disk, in layer order, with recomputation and dropout. runOf checks that touched memory
// equals the plan. By default each precision has half of the stages.
func TestLoRAGivesTheSameBits(t *testing.T) {
	t.Parallel()
	for k, m := range []string{"gpt2", "llama-untied"} {
		for p, precision := range []string{"fp32", "bf16"} {
			c := withLoRA(m, 4, blockTargets[m]...)
			c.Ranks, c.Steps, c.Precision, c.Clip, c.LoRA.Dropout = 3, 3, precision, 0.5, 0.1
			c.EvalData, c.EvalSteps = c.Data, 1
			c.Accum, c.Reproducible, c.Zero = 2, true, 0
			want := runOf(t, c)
			for _, zero := range long.Or(stagePairs[(k+p)%2], []int{0, 1, 2, 3}) {
				v := c
				v.Zero, v.Disk = zero, scratch(t)
				v.Recompute = []string{"full", "selective", "none", "full"}[zero]
				v.Offload = []string{"", "optimizer=host,parameters=host", "optimizer=disk,gradients=host,activations=host", "optimizer=disk,parameters=disk"}[(zero+k)%4]
				if zero%2 == 1 {
					v.AccumOrder = "layer"
				}
				if zero == 2 {
					v.Ranks, v.Accum = 2, 3
				}
				got := runOf(t, v)
				require.Equal(t, want.losses, got.losses, "%s, %s, stage %d", m, precision, zero)
				require.Equal(t, want.sha, got.sha, "%s, %s, stage %d", m, precision, zero)
			}
		}
	}
}

// TestLoRATrainsAdaptersAlone checks that the model's own parameters keep their values and have no
// gradients or optimizer states. The adapters are a separate, trained unit of their block.
func TestLoRATrainsAdaptersAlone(t *testing.T) {
	t.Parallel()
	c := withLoRA("gpt2", 2, "h.1.attn.*")
	c.Ranks, c.Steps = 2, 3
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	p := tr.Plan().Program
	values := func() map[string][]float32 {
		all := map[string][]float32{}
		for _, name := range tr.Parameters() {
			_, v, err := tr.Parameter(name)
			require.NoError(t, err)
			all[name] = v
		}
		return all
	}
	before := values()
	require.NoError(t, tr.Run(context.Background(), nil))
	adapters := 0
	for name, now := range values() {
		if lora.IsAdapter(name) {
			adapters++
			require.NotEqual(t, before[name], now, name)
		} else {
			require.Equal(t, before[name], now, name)
		}
	}
	require.Equal(t, 4, adapters)
	for i := range p.Params {
		prm, u := &p.Params[i], &p.Units[p.Params[i].Unit]
		require.Equal(t, !lora.IsAdapter(prm.Name), u.Frozen, prm.Name)
		require.Equal(t, u.Frozen, len(u.States) == 0, prm.Name)
		if lora.IsAdapter(prm.Name) {
			require.Equal(t, graph.Block{Template: "h", Index: 1}, u.Block, prm.Name)
		}
	}
	a := before["h.1.attn.c_attn.lora_A.weight"]
	bound, largest := 1/math.Sqrt(32), 0.0
	for _, v := range a {
		largest = max(largest, math.Abs(float64(v)))
	}
	require.LessOrEqual(t, largest, bound)
	require.Greater(t, largest, 0.8*bound, "uniform up to the bound")
	require.Equal(t, make([]float32, 3*32*2), before["h.1.attn.c_attn.lora_B.weight"])
}

// TestLoRAEvaluatesAsTheMergedModel checks that evaluation uses the adapters without dropout. Its
// loss must be that of the model with the adapters' products added to the weights.
func TestLoRAEvaluatesAsTheMergedModel(t *testing.T) {
	t.Parallel()
	for _, m := range []string{"gpt2", "llama-untied"} {
		c := withLoRA(m, 8, blockTargets[m]...)
		c.Steps, c.LoRA.Dropout, c.EvalData, c.EvalSteps = 5, 0.2, c.Data, 4
		var loss float64
		evaluated := func(r StepResult) error {
			if r.Eval != nil {
				loss = float64(r.Eval.Loss)
			}
			return nil
		}
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		require.NoError(t, tr.Run(context.Background(), evaluated))
		adapted := loss

		plain := tiny(m)
		plain.Steps, plain.LR, plain.WeightDecay, plain.EvalData, plain.EvalSteps = 1, 0, 0, c.Data, 4
		merged, err := plain.start(context.Background())
		require.NoError(t, err)
		for _, name := range merged.Parameters() {
			shape, w, err := merged.Parameter(name)
			require.NoError(t, err)
			_, a, err := tr.Parameter(lora.Layer(name) + lora.SuffixA)
			if err != nil {
				continue // without an adapter
			}
			_, b, err := tr.Parameter(lora.Layer(name) + lora.SuffixB)
			require.NoError(t, err)
			r, cols := c.LoRA.Rank, int(shape[1])
			for i := range w {
				row, col := i/cols, i%cols
				if m == "gpt2" { // weights of shape (in, out)
					row, col = col, row
				}
				sum := 0.0
				for k := range r {
					sum += float64(b[row*r+k]) * float64(a[k*len(a)/r+col])
				}
				w[i] += float32(c.LoRA.Factor() * sum)
			}
			require.NoError(t, merged.SetParameter(name, w))
		}
		require.NoError(t, merged.Run(context.Background(), evaluated))
		require.NotZero(t, loss)
		require.InDelta(t, adapted, loss, 1e-5, m)
		require.NoError(t, tr.Close())
		require.NoError(t, merged.Close())
	}
}

// TestLoRAWithTheFrozenCache adapts only layer 1. The outputs of the frozen layers before it come
// from the cache and must have the bits of their forward pass.
func TestLoRAWithTheFrozenCache(t *testing.T) {
	t.Parallel()
	for i, m := range []string{"gpt2", "llama-untied"} {
		c := frozenRun(t, m, 8, 40) // an epoch is two steps
		c.Freeze, c.LoRA = nil, lora.Options{Rank: 4, Alpha: 8, Targets: []string{"*.1.*"}, Dropout: []float64{0, 0.1}[i]}
		c.Ranks, c.Steps, c.Zero = 2, 5, 0
		want := cachedRun(t, c)
		c.Zero, c.Disk = 3, scratch(t)
		c.FrozenCache = config.FrozenCache{Tier: []graph.Space{graph.Host, graph.Disk}[i], Bytes: 1 << 20}
		got := cachedRun(t, c)
		require.Equal(t, want.losses, got.losses, m)
		require.Equal(t, want.sha, got.sha, m)
		require.Equal(t, []bool{false, false, true, true, true}, got.cached, m)
	}
}

// TestLoRAResumes resumes at another number of ranks with the bits of an uninterrupted run. Other
// adapters are refused.
func TestLoRAResumes(t *testing.T) {
	t.Parallel()
	c := withLoRA("llama-tied", 2, "*_proj.weight")
	c.Steps, c.Ranks, c.Accum, c.Reproducible = 4, 2, 1, true
	want := runOf(t, c)
	first := c
	first.Steps, first.Checkpoint, first.Zero = 2, scratch(t), 1
	runOf(t, first)
	second := c
	second.Checkpoint, second.Resume, second.Ranks, second.Accum = first.Checkpoint, true, 1, 2
	other := second
	other.LoRA.Rank = 4
	_, err := other.start(context.Background())
	require.ErrorContains(t, err, "Config.LoRA r=2,alpha=16,targets=*_proj.weight, this run has r=4")
	require.Equal(t, want.sha, runOf(t, second).sha)
}

func TestLoRARefuses(t *testing.T) {
	t.Parallel()
	for said, change := range map[string]func(c *request){
		"Config.LoRA with Config.Freeze":                 func(c *request) { c.Freeze = []string{"wte.*"} },
		"Config.LoRA with Config.Device cuda":            func(c *request) { c.Device = "cuda" },
		"r is -1":                                        func(c *request) { c.LoRA.Rank = -1 },
		"alpha is 0":                                     func(c *request) { c.LoRA.Alpha = 0 },
		"dropout is 1":                                   func(c *request) { c.LoRA.Dropout = 1 },
		"no weight of a linear product matches":          func(c *request) { c.LoRA.Targets = []string{"*.attention.*"} },
		`names wte.weight, which no linear product uses`: func(c *request) { c.LoRA.Targets = []string{"wte.weight"} },
	} {
		c := withLoRA("gpt2", 2, "*.attn.*")
		change(&c)
		_, err := c.start(context.Background())
		require.ErrorContains(t, err, said, fmt.Sprint(c.LoRA))
	}
}

// TestLoRACheckpointsCompute checks that a checkpoint with adapters generates and evaluates with
// them. Init accepts it for a run with the same adapters and refuses it without.
func TestLoRACheckpointsCompute(t *testing.T) {
	t.Parallel()
	c := withLoRA("gpt2", 4, "*.attn.*", "*.mlp.*")
	c.Steps, c.Checkpoint, c.EvalData, c.EvalSteps = 6, scratch(t), c.Data, 3
	c.Generate, c.Tokenizer = true, "bytes"
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	require.NoError(t, tr.Run(context.Background(), nil))
	sha, err := tr.ParamsSHA256()
	require.NoError(t, err)
	want, err := tr.Generate(context.Background(), "func ", 12, Sampling{})
	require.NoError(t, err)
	require.NoError(t, tr.Close())

	inference := request{Config: config.Default()}
	inference.Model, inference.Init, inference.Inference, inference.Generate, inference.Tokenizer = c.Checkpoint, c.Checkpoint, true, true, "bytes"
	inference.Seq = c.Seq
	made, err := inference.start(context.Background())
	require.NoError(t, err)
	got, err := made.Generate(context.Background(), "func ", 12, Sampling{})
	require.NoError(t, err)
	require.Equal(t, want, got)
	again, err := made.ParamsSHA256()
	require.NoError(t, err)
	require.Equal(t, sha, again)
	require.Zero(t, made.Plan().Layout.Spaces[graph.Device].ClassPeak[graph.Optimizer])
	require.NoError(t, made.Close())

	next := withLoRA("gpt2", 4, "*.attn.*", "*.mlp.*")
	next.Init, next.Model = c.Checkpoint, c.Checkpoint
	tr, err = next.start(context.Background())
	require.NoError(t, err)
	again, err = tr.ParamsSHA256()
	require.NoError(t, err)
	require.Equal(t, sha, again)
	require.NoError(t, tr.Close())
	next.LoRA = lora.Options{}
	_, err = next.start(context.Background())
	require.ErrorContains(t, err, "it holds adapters, and the run has no Config.LoRA")

	// Without the checkpoint's record, weights do not define the scale.
	path, name := filepath.Join(t.TempDir(), safetensors.FileName), "h.0.attn.c_attn"+lora.SuffixB
	w, err := safetensors.Create(path, []safetensors.Tensor{{Name: name, DType: safetensors.F32, Shape: []int64{96, 4}}}, nil)
	require.NoError(t, err)
	require.NoError(t, w.WriteFloat32(name, 0, make([]float32, 96*4)))
	require.NoError(t, w.Commit())
	next.LoRA, next.Model, next.Init = c.LoRA, c.Model, path
	_, err = next.start(context.Background())
	require.ErrorContains(t, err, "these weights do not say how they are scaled; give the whole checkpoint's folder")
}

// TestLoRAWithoutTargets checks the default targets: all linear layers of the repeated blocks, but
// not the head or embeddings.
func TestLoRAWithoutTargets(t *testing.T) {
	t.Parallel()
	for model, layers := range map[string][]string{"gpt2": {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"},
		"llama-untied": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}} {
		c := withLoRA(model, 2)
		c.Steps = 1
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		block := map[string]string{"gpt2": "h.", "llama-untied": "model.layers."}[model]
		var want, got []string
		for i := range 2 {
			for _, layer := range layers {
				want = append(want, fmt.Sprintf("%s%d.%s%s", block, i, layer, lora.SuffixA), fmt.Sprintf("%s%d.%s%s", block, i, layer, lora.SuffixB))
			}
		}
		for _, name := range tr.Parameters() {
			if lora.IsAdapter(name) {
				got = append(got, name)
			}
		}
		require.Equal(t, want, got)
		require.Regexp(t, fmt.Sprintf("^lora: r 2, alpha 16, %d matrices, [0-9,]+ trained parameters of [0-9,]+$", len(want)/2), tr.Notes()[0])
		require.NoError(t, tr.Close())
	}
}
