package train

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/internal/testkit/nullcomm"
	"github.com/spillway-ml/spillway/internal/testkit/nulldevice"
	"github.com/spillway-ml/spillway/internal/testkit/nullkernels"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/run"
)

// TestBaseGivesTheSameBits trains adapters on a base stored in another type. The bits must be the
// same at every stage and number of ranks, offloaded to host or disk, in layer order, and after a
// resume.
func TestBaseGivesTheSameBits(t *testing.T) {
	t.Parallel()
	for k, of := range []struct{ model, base, precision string }{
		{"gpt2", "int8", "bf16"}, {"llama-untied", "int8", "fp32"}, {"llama-tied", "bf16", "fp32"}, {"gpt2", "int8", "fp16"}, {"gpt2", "fp32", "bf16"},
	} {
		c := withLoRA(of.model, 4, blockTargets[of.model]...)
		c.Steps, c.Precision, c.Base, c.Clip = 3, of.precision, of.base, 0.5
		c.EvalData, c.EvalSteps = c.Data, 1
		c.Ranks, c.Accum, c.Reproducible, c.Zero = 1, 6, true, 0
		want := runOf(t, c)
		for zero := range 4 {
			if !long.On() && zero%2 == k%2 { // half of the stages for each type
				continue
			}
			v := c
			v.Zero, v.Disk = zero, scratch(t)
			v.Ranks = []int{2, 3, 6, 3}[(zero+k)%4]
			v.Accum = 6 / v.Ranks
			v.Recompute = []string{"none", "full"}[zero%2]
			v.Offload = []string{"", "parameters=host", "parameters=disk,optimizer=disk", "parameters=host:50%"}[(zero+2*k)%4]
			if v.Accum > 1 && (zero+k)%2 == 0 && of.model != "gpt2" {
				v.AccumOrder = "layer"
			}
			got := runOf(t, v)
			what := fmt.Sprintf("%+v, stage %d, %d ranks, %s", of, zero, v.Ranks, v.Offload)
			require.Equal(t, want.losses, got.losses, what)
			require.Equal(t, want.sha, got.sha, what)
		}
		first, second := c, c
		first.Steps, first.Checkpoint, first.Ranks, first.Accum, first.Zero = 1, scratch(t), 2, 3, 3
		runOf(t, first)
		second.Checkpoint, second.Resume, second.Ranks, second.Accum, second.Zero = first.Checkpoint, true, 3, 2, 1
		got := runOf(t, second)
		require.Equal(t, want.losses[1:], got.losses, "%+v", of)
		require.Equal(t, want.sha, got.sha, "%+v", of)
	}
}

// TestInt8BaseRestsInCodes checks the stored size of an int8 base in a shard: one byte per
// parameter and 4 bytes per 256 parameters. No other buffer may hold frozen parameters.
func TestInt8BaseRestsInCodes(t *testing.T) {
	t.Parallel()
	for zero := range 4 {
		c := withLoRA("llama-untied", 4, "*_proj.weight")
		c.Ranks, c.Zero, c.Base, c.Precision = 2, zero, "int8", "bf16"
		p, err := c.planned().Plan(t.Context())
		require.NoError(t, err)
		for i := range p.Program.Units {
			u := &p.Program.Units[i]
			if !u.Frozen {
				continue
			}
			n := u.FlatLen
			if u.Value.Axis >= 0 {
				n /= 2
			}
			root, _ := p.Program.Resolve(u.Value.Buf, nil)
			require.Equal(t, n+n/graph.QuantBlock*4, p.Program.Buf(root).Bytes(), u.Name)
			for id := range p.Program.Buffers {
				b := &p.Program.Buffers[id]
				if b.Unit == i && b.Life == graph.LifeRun && b.View == nil {
					require.Equal(t, graph.BufID(id), root, "%s rests beside the base of %s", b.Name, u.Name)
				}
			}
		}
	}
}

// pretrained trains a small model on the first half of the text, and returns its
// checkpoint folder and a file with the second half.
func pretrained(t *testing.T, model string, steps int) (folder, data string) {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), []byte(curveModels[model]), 0o644))
	text, err := os.ReadFile("../testdata/text.bin")
	require.NoError(t, err)
	half := len(text) / 4 * 2
	for name, part := range map[string][]byte{"first.bin": text[:half], "second.bin": text[half:]} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), part, 0o644))
	}
	c := request{Config: config.Default()}
	c.Model, c.Data, c.Order, c.Batch, c.Seq, c.Steps, c.LR, c.Clip = dir, filepath.Join(dir, "first.bin"), "shuffled", 8, 32, steps, 3e-3, 1
	c.Checkpoint = filepath.Join(t.TempDir(), "saved")
	tr, err := c.start(t.Context())
	require.NoError(t, err)
	require.NoError(t, tr.Run(t.Context(), nil))
	require.NoError(t, tr.Close())
	return c.Checkpoint, filepath.Join(dir, "second.bin")
}

// baseCurve fine-tunes a pretrained model with adapters and returns the mean loss of the steps.
// With shifted, each block of the base gets the scale of the block before it.
func baseCurve(t *testing.T, folder, data, base string, seed int64, steps int, shifted bool) (loss float64) {
	t.Helper()
	c := request{Config: config.Default()}
	c.Model, c.Init, c.Data = folder, folder, data
	c.Order, c.Seed, c.Batch, c.Seq, c.Steps = "shuffled", seed, 4, 32, steps
	c.Precision, c.LR, c.LRSchedule, c.Warmup, c.Clip = "bf16", 2e-3, "cosine", steps/10, 1
	c.LoRA, c.Base = lora.Options{Rank: 8, Alpha: 16, Targets: []string{"*attn*", "*mlp*"}}, base
	tr, err := c.start(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	if shifted {
		shiftScales(t, tr)
	}
	require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
		loss += float64(r.Loss) / float64(steps)
		return nil
	}))
	return loss
}

// shiftScales moves the scales of every unit of the base by one block; it needs a run on one rank.
func shiftScales(t *testing.T, tr *Trainer) {
	t.Helper()
	p := tr.Plan().Program
	for i := range p.Units {
		scales := p.ScalesOf(p.Units[i].Value.Buf)
		if scales == graph.NoBuf {
			continue
		}
		v := make([]float32, p.Buf(scales).Elems())
		require.NoError(t, tr.ranks.First().Read(scales, 0, run.Float32Bytes(v)))
		v = append(v[len(v)-1:], v[:len(v)-1]...)
		require.NoError(t, tr.ranks.First().Write(scales, 0, run.Float32Bytes(v)))
	}
}

// TestInt8BaseFollowsBF16 checks that the mean loss with an int8 base is at most 1 % above that
// with a bf16 base. As a control, scales shifted by one block must give a higher loss. By default
// it runs 60 steps with one seed and model, with SPILLWAY_LONG 300 steps with three seeds.
func TestInt8BaseFollowsBF16(t *testing.T) {
	t.Parallel()
	steps, seeds := long.Or(60, 300), long.Or(1, 3)
	for _, model := range long.Or(curveNames[:1], curveNames) {
		folder, data := pretrained(t, model, 200)
		mean := func(base string, shifted bool) (loss float64) {
			for seed := range int64(seeds) {
				loss += baseCurve(t, folder, data, base, seed+1, steps, shifted) / float64(seeds)
			}
			return loss
		}
		want, got, broken := mean("bf16", false), mean("int8", false), mean("int8", true)
		t.Logf("%s, %d steps, %d seeds: mean loss %.4f in bf16, %.4f in int8 (%+.3f %%), %.4f with scales shifted", model, steps, seeds, want, got, 100*(got/want-1), broken)
		require.LessOrEqual(t, got, 1.01*want, model)
		require.Greater(t, broken, 1.01*want, "%s: the control is no worse", model)
	}
}

func TestBaseRefuses(t *testing.T) {
	t.Parallel()
	for said, change := range map[string]func(c *request){
		"Config.Base nf4: 4 bits are not built":       func(c *request) { c.Base = "nf4" },
		`Config.Base "int5" is not known`:             func(c *request) { c.Base = "int5" },
		"Config.Base int8 needs Config.LoRA":          func(c *request) { c.LoRA = lora.Options{} },
		"Config.Base bf16 with Config.Precision fp16": func(c *request) { c.Base, c.Precision = "bf16", "fp16" },
		"Config.LoRA with Config.Device cuda":         func(c *request) { c.Device = "cuda" },
	} {
		c := withLoRA("gpt2", 2, "*.attn.*")
		c.Base = "int8"
		change(&c)
		_, err := c.start(context.Background())
		require.ErrorContains(t, err, said)
	}
}

// TestLlama8BWithAnInt8BaseFits24GB plans Llama 3 8B with an int8 base for a 24 GB GPU, with
// adapter ranks 4 and 256. On the null device, the highest byte that an operation touches must be
// the planned peak.
func TestLlama8BWithAnInt8BaseFits24GB(t *testing.T) {
	t.Parallel()
	for _, rank := range []int{4, 256} {
		c := request{Config: config.Default()}
		c.Model, c.Target, c.Precision, c.Batch, c.Seq, c.Recompute, c.DeviceMemory = "llama-3-8b", graph.CUDATarget(), "bf16", 1, 1024, "full", 24e9
		c.Outside[graph.Device] = 650 << 20 // CUDA's own memory on a card of that generation
		c.LoRA, c.Base = lora.Options{Rank: rank, Alpha: 16, Targets: []string{"*_proj.weight"}}, "int8"
		p, err := c.planned().Plan(t.Context())
		require.NoError(t, err)
		e, err := exec.New(exec.Config{Program: p.Program, Layout: p.Layout, Context: nulldevice.New(0), Library: nullkernels.Library{},
			Groups: map[int]comm.Group{-1: nullcomm.New(0, 1), 0: nullcomm.New(0, 1)}, Coord: []int{0}})
		require.NoError(t, err)
		e.SetStep(0, 0)
		require.NoError(t, e.RunSection("step", nil))
		require.Equal(t, p.Layout.Spaces[graph.Device].Peak, e.Touched(graph.Device), "r %d", rank)
		require.NoError(t, e.Close())
		t.Logf("r %d: %s of device memory", rank, plan.Bytes(p.Layout.Spaces[graph.Device].Peak))
	}
}
