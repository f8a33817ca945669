package plan

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/pmezard/go-difflib/difflib"
	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/fsdp"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/zero"
)

// The golden files, one for each pass, show the changes that the pass makes in a small model. A
// change of a file changes every run, so review it as such; -rewrite accepts it.
//
//	pass name=recompute recompute=full      the difference that the pass makes
//
// The model is a GPT-2 of two blocks, 16 wide, with an untied head. "layers=1" selects one block,
// "mlp" a classifier of two layers.
func TestGoldenPasses(t *testing.T) {
	seen := map[string]bool{}
	datadriven.Walk(t, "testdata/passes", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			require.Equal(t, "pass", d.Cmd)
			var name string
			d.ScanArgs(t, "name", &name)
			seen[name] = true
			return passDiff(t, d, name)
		})
	})
	for _, ps := range passes {
		require.True(t, seen[ps.name], "pass %q has no file in testdata/passes", ps.name)
	}
}

func passDiff(t *testing.T, d *datadriven.TestData, name string) string {
	m := model.Config{Family: model.GPT2, Layers: 2, Width: 16, Heads: 2, Vocab: 20, Positions: 8}
	if d.HasArg("layers") {
		d.ScanArgs(t, "layers", &m.Layers)
	}
	seq, stage := 8, 0
	if d.HasArg("mlp") {
		m, seq = model.Config{Family: model.MLP, Inputs: 5, Hidden: []int{6}, Classes: 3}, 1
	}
	cfg := Config{Ranks: 1, Accum: 1, Prefetch: 1, Optimizer: adamW, Target: graph.CPUTarget(), Rows: 2}
	text := func(key string) (s string) {
		if d.HasArg(key) {
			d.ScanArgs(t, key, &s)
		}
		return s
	}
	number := func(key string, into *int) {
		if d.HasArg(key) {
			d.ScanArgs(t, key, into)
		}
	}
	number("ranks", &cfg.Ranks)
	number("accum", &cfg.Accum)
	number("prefetch", &cfg.Prefetch)
	number("shard", &cfg.ShardSize)
	number("tensor", &cfg.Tensor)
	number("slices", &cfg.Slices)
	number("pipeline", &cfg.Pipeline)
	m.TiedHead = m.TiedHead || d.HasArg("tied")
	cfg.LayerOrder = text("order") == "layer"
	number("zero", &stage)
	cfg.Stage = zero.Stage(stage)
	var err error
	cfg.Recompute, err = recompute.Parse(text("recompute"))
	require.NoError(t, err)
	cfg.Offload, err = offload.Parse(strings.ReplaceAll(text("offload"), "+", ","))
	require.NoError(t, err)
	if p := text("precision"); p != "" {
		cfg.Precision, err = precision.Parse(p)
		require.NoError(t, err)
	}
	if f := text("freeze"); f != "" {
		cfg.Freeze = []string{f}
	}
	cfg.LoRA, err = lora.Parse(strings.ReplaceAll(text("lora"), "+", ","))
	require.NoError(t, err)
	cfg.Base, err = fsdp.ParseBase(text("base"))
	require.NoError(t, err)
	cfg.CachePrefix, cfg.SkipNonFinite, cfg.Reproducible = d.HasArg("cached"), d.HasArg("skip"), d.HasArg("reproducible")
	for _, s := range strings.Split(text("int8"), "+") {
		switch s {
		case "activations":
			cfg.Int8.Activations = true
		case "matmul":
			cfg.Int8.Matmul = true
		case "gather":
			cfg.Int8Gather = true
		case "reduce":
			cfg.Int8Reduce = true
		}
	}
	if d.HasArg("clip") {
		cfg.Clip = 1
	}
	var before, after string
	cfg.Observe = func(pass string, p *graph.Program) error {
		switch {
		case pass == name:
			after = graph.Format(p)
		case after == "":
			before = graph.Format(p)
		}
		return nil
	}
	_, err = Build(forwardOf(t, m, 2, seq, d.HasArg("all")), cfg)
	require.NoError(t, err)
	diff, err := difflib.GetUnifiedDiffString(difflib.UnifiedDiff{A: difflib.SplitLines(before), B: difflib.SplitLines(after), Context: 1})
	require.NoError(t, err)
	if diff == "" {
		return fmt.Sprintf("%s changes nothing\n", name)
	}
	return diff
}
