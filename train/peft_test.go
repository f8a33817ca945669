package train

import (
	"context"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/train/saving"
)

// exported exports the newest checkpoint of a folder to a new folder.
func exported(t *testing.T, from, format string, merge bool) string {
	t.Helper()
	c, _, err := checkpoint.Take(t.Context(), filesys.System, from)
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	x, err := saving.Exported(c, format, merge, checkpoint.ShardBytes)
	require.NoError(t, err)
	to := filepath.Join(t.TempDir(), "exported")
	require.NoError(t, c.Export(t.Context(), to, x))
	return to
}

// logitsOf returns the logits of a model after a prompt.
func logitsOf(t *testing.T, folder string, prompt ...int32) []float32 {
	t.Helper()
	c := request{Config: config.Default()}
	c.Model, c.Init, c.Inference, c.Generate, c.Tokenizer, c.Seq = folder, folder, true, true, "bytes", 40
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	if prompt == nil {
		prompt = []int32{102, 117, 110, 99, 32, 109}
	}
	return logitsAfter(t, newDecoder(tr), 0, prompt)
}

// TestAdaptersInThePublishedLayout loads adapters in PEFT's published layout, written by
// testdata/peft.py without Spillway. The logits must equal PyTorch's and differ from the base's.
// One adapter has only the required fields.
func TestAdaptersInThePublishedLayout(t *testing.T) {
	t.Parallel()
	var want struct {
		Prompt []int32
		Logits map[string]struct{ Adapted, Base []float32 }
	}
	text, err := os.ReadFile("../testdata/peft/logits.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &want))
	require.Len(t, want.Logits, 2)
	for model, logits := range want.Logits {
		require.InDeltaSlice(t, logits.Adapted, logitsOf(t, "../testdata/peft/"+model, want.Prompt...), 1e-4, model)
		base := logitsOf(t, "../testdata/"+model, want.Prompt...)
		require.InDeltaSlice(t, logits.Base, base, 1e-4, model)
		moved := 0.0
		for i := range base {
			moved = max(moved, math.Abs(float64(base[i]-logits.Adapted[i])))
		}
		require.Greater(t, moved, 0.1, "%s: the adapter changes nothing", model)

		// Training continues from it, and the export has the same layout.
		c := tiny(model)
		c.Init, c.Steps, c.Checkpoint = "../testdata/peft/"+model, 1, scratch(t)
		c.LoRA = map[string]lora.Options{"gpt2": {Rank: 4, Alpha: 12, Targets: []string{"*.c_attn.*", "*.c_fc.*"}},
			"llama-tied": {Rank: 8, Alpha: 8, Targets: []string{"*.q_proj.*", "*.v_proj.*", "*.down_proj.*"}}}[model]
		runOf(t, c)
		was, err := safetensors.Open("../testdata/peft/" + model + "/" + lora.WeightsFile)
		require.NoError(t, err)
		now, err := safetensors.Open(filepath.Join(exported(t, c.Checkpoint, saving.FormatPEFT, false), lora.WeightsFile))
		require.NoError(t, err)
		shapes := func(r *safetensors.Reader) map[string][]int64 {
			all := map[string][]int64{}
			for _, f := range r.Tensors() {
				all[f.Name] = f.Shape
			}
			require.NoError(t, r.Close())
			return all
		}
		require.Equal(t, shapes(was), shapes(now), model)
	}
}

// TestAdaptersGoOutAndIn exports a run's adapters. In PEFT's layout they give the bits of the
// checkpoint; merged into the model, the logits agree within 1e-5. The hash detects another base,
// which is refused.
func TestAdaptersGoOutAndIn(t *testing.T) {
	t.Parallel()
	for _, of := range []struct{ model, base string }{{"gpt2", ""}, {"llama-tied", ""}, {"llama-untied", "int8"}} {
		c := withLoRA(of.model, 4, blockTargets[of.model]...)
		c.Steps, c.Checkpoint, c.Base, c.Ranks = 6, scratch(t), of.base, 2
		runOf(t, c)
		want := logitsOf(t, c.Checkpoint)

		merged := exported(t, c.Checkpoint, saving.FormatHF, true)
		got := logitsOf(t, merged)
		plain := logitsOf(t, c.Init)
		moved := 0.0
		for i := range want {
			require.InDelta(t, want[i], got[i], 1e-5, of.model)
			moved = max(moved, float64(want[i]-plain[i]))
		}
		require.Greater(t, moved, 0.01, "%s: the adapters change nothing", of.model)
		r, err := safetensors.Open(merged)
		require.NoError(t, err)
		for _, f := range r.Tensors() {
			require.False(t, lora.IsAdapter(f.Name), f.Name)
		}
		require.NoError(t, r.Close())

		folder := exported(t, c.Checkpoint, saving.FormatPEFT, false)
		text, err := os.ReadFile(filepath.Join(folder, lora.ConfigFile))
		require.NoError(t, err)
		base, err := filepath.Abs(c.Init)
		require.NoError(t, err)
		require.Contains(t, string(text), base)
		if of.base == "" { // with an int8 base the run computed with rounded values
			require.Equal(t, want, logitsOf(t, folder), of.model)
		}
		other := strings.Replace(string(text), base, filepath.Join(filepath.Dir(base), map[string]string{"gpt2": "gpt2", "llama-tied": "smollm", "llama-untied": "mistral"}[of.model]), 1)
		if of.model == "gpt2" { // same shape, other values
			other = strings.Replace(string(text), base, merged, 1)
		}
		require.NoError(t, os.WriteFile(filepath.Join(folder, lora.ConfigFile), []byte(other), 0o644))
		q := request{Config: config.Default()}
		q.Model, q.Init, q.Inference, q.Generate, q.Tokenizer = folder, folder, true, true, "bytes"
		_, err = q.start(context.Background())
		require.Error(t, err)
		if of.model == "gpt2" {
			require.ErrorContains(t, err, "the adapter belongs to another model than")
		}
	}
}

// TestAdaptersGoOnTraining checks that training continues from an exported adapter's folder, and
// that another rank is refused.
func TestAdaptersGoOnTraining(t *testing.T) {
	t.Parallel()
	c := withLoRA("llama-tied", 2, "*_proj.weight")
	c.Steps, c.Checkpoint = 3, scratch(t)
	want := runOf(t, c)
	next := withLoRA("llama-tied", 2, "*_proj.weight")
	next.Init = exported(t, c.Checkpoint, saving.FormatPEFT, false)
	next.Steps, next.Checkpoint = 1, scratch(t)
	tr, err := next.start(context.Background())
	require.NoError(t, err)
	sha, err := tr.ParamsSHA256()
	require.NoError(t, err)
	require.Equal(t, want.sha, sha)
	require.NoError(t, tr.Run(context.Background(), nil))
	require.NoError(t, tr.Close())
	first, err := os.ReadFile(filepath.Join(next.Init, lora.ConfigFile))
	require.NoError(t, err)
	second, err := os.ReadFile(filepath.Join(exported(t, next.Checkpoint, saving.FormatPEFT, false), lora.ConfigFile))
	require.NoError(t, err)
	hash := func(text []byte) string {
		_, rest, ok := strings.Cut(string(text), `"spillway_base_sha256": "`)
		require.True(t, ok)
		return rest[:64]
	}
	require.Equal(t, hash(first), hash(second))
	next.LoRA.Rank, next.Checkpoint = 4, ""
	_, err = next.start(context.Background())
	require.ErrorContains(t, err, "its adapters have r 2 and alpha 16, and Config.LoRA has r 4 and alpha 16")
}

func TestExportedRefuses(t *testing.T) {
	t.Parallel()
	of := func(change func(c *request)) *checkpoint.Checkpoint {
		c := withLoRA("gpt2", 2, "*.attn.*")
		c.Steps, c.Checkpoint = 1, scratch(t)
		change(&c)
		runOf(t, c)
		saved, _, err := checkpoint.Take(t.Context(), filesys.System, c.Checkpoint)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, saved.Close()) })
		return saved
	}
	with, without := of(func(*request) {}), of(func(c *request) { c.LoRA = lora.Options{} })
	for said, call := range map[string]func() error{
		"has adapters, which a model's folder cannot hold; merge them": func() error { _, err := saving.Exported(with, "hf", false, 1); return err },
		"merging leaves none":        func() error { _, err := saving.Exported(with, "peft", true, 1); return err },
		`format "gguf" is not known`: func() error { _, err := saving.Exported(with, "gguf", false, 1); return err },
		"has no adapters":            func() error { _, err := saving.Exported(without, "peft", false, 1); return err },
		"has no adapters; export it": func() error { _, err := saving.Exported(without, "hf", true, 1); return err },
	} {
		require.ErrorContains(t, call(), said)
	}
	_, err := saving.Exported(without, "hf", false, 1)
	require.NoError(t, err)
}
