package graph_test

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
)

var update = flag.Bool("update", false, "rewrite the golden files in testdata")

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".txt")
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), got)
}

func gpt2(change func(c *model.Config)) model.Config {
	c := model.Config{Family: model.GPT2, Layers: 2, Width: 8, Heads: 2, Vocab: 11, Positions: 6, TiedHead: true}
	if change != nil {
		change(&c)
	}
	return c
}

func llama(change func(c *model.Config)) model.Config {
	c := model.Config{Family: model.Llama, Layers: 2, Width: 8, Heads: 4, KVHeads: 2, HeadDim: 4, FFN: 12, Vocab: 11, Positions: 6}
	if change != nil {
		change(&c)
	}
	return c
}

// models are complete tiny models. Their gradients are checked with finite differences. Fusing must
// not change their bits.
var models = []struct {
	name   string
	c      model.Config
	freeze []string
	golden bool
	fused  int // linear and activation pairs
}{
	{"gpt2-tied", gpt2(nil), nil, true, 2},
	{"gpt2-untied", gpt2(func(c *model.Config) { c.TiedHead, c.Layers = false, 1 }), nil, true, 1},
	{"gpt2-frozen-blocks", gpt2(nil), []string{"h.0.*"}, true, 2},
	{"gpt2-frozen-embedding", gpt2(func(c *model.Config) { c.TiedHead = false }), []string{"wte*"}, false, 2},
	{"gpt2-only-biases", gpt2(nil), []string{"*weight"}, false, 2},
	{"gpt2-dropout", gpt2(func(c *model.Config) { c.EmbdDropout, c.ResidDropout = 0.2, 0.3 }), nil, true, 2},
	{"gpt2-exact-gelu", gpt2(func(c *model.Config) { c.Act, c.Layers = graph.ActGELU, 1 }), nil, false, 1},
	{"llama-untied", llama(nil), nil, true, 0},
	{"llama-tied", llama(func(c *model.Config) { c.TiedHead, c.Layers = true, 1 }), nil, false, 0},
	{"llama-frozen-lower", llama(nil), []string{"model.embed*", "model.layers.0.*"}, false, 0},
	{"llama-biases-scaled-dropout", llama(func(c *model.Config) {
		c.QKVBias, c.OutBias, c.MLPBias, c.ResidDropout, c.Layers = true, true, true, 0.25, 1
		c.RopeScaling = &model.RopeScaling{Factor: 8, LowFreq: 1, HighFreq: 4, OriginalPositions: 16}
	}), nil, false, 0},
	{"mlp", model.Config{Family: model.MLP, Inputs: 5, Hidden: []int{6, 4}, Classes: 3}, nil, true, 2},
	{"mlp-softmax-regression", model.Config{Family: model.MLP, Inputs: 5, Classes: 3}, nil, false, 0},
	{"cnn", model.Config{Family: model.CNN, Height: 6, ImgWidth: 5, Chans: 2, Hidden: []int{3, 4}, Classes: 3, Act: graph.ActGELU}, nil, true, 0},
}

func TestGradientsOfModels(t *testing.T) {
	for _, m := range models {
		t.Run(m.name, func(t *testing.T) {
			seq := 5
			if m.c.Vocab == 0 {
				seq = 1
			}
			p, err := model.Build(m.c, model.Train, 2, seq)
			require.NoError(t, err)
			for _, pattern := range m.freeze {
				_, err = graph.Freeze(p, pattern)
				require.NoError(t, err)
			}
			q := checkGradients(t, p, 1)
			if m.golden {
				golden(t, m.name, dump(q))
			}
			f := graph.Fuse(q)
			checkOps(t, f)
			require.Equal(t, m.fused, len(q.Sections[0].Phases[0].Ops)-len(f.Sections[0].Phases[0].Ops))
			sameBits(t, q, f, 2)
		})
	}
}

// A tied head's parameter has one gradient: the head writes it and the embedding, last in the
// backward, adds to it.
func TestTiedHeadHasOneGradient(t *testing.T) {
	p, err := model.Build(gpt2(nil), model.Train, 2, 5)
	require.NoError(t, err)
	q, err := graph.Differentiate(p)
	require.NoError(t, err)
	ops := q.Sections[0].Phases[0].Ops
	var uses []string
	for i, op := range ops {
		for _, o := range op.Out {
			if o.Buf == q.Params[0].Grad {
				uses = append(uses, op.Name+" "+o.Mode.String())
				if op.Kind == graph.EmbedGrad {
					require.Equal(t, len(ops)-1, i)
				}
			}
		}
	}
	require.Equal(t, "wte.weight", q.Params[0].Name)
	require.Equal(t, []string{"head write", "wte/dw accum"}, uses)
	require.Equal(t, graph.HeadLossGrad, ops[len(p.Sections[0].Phases[0].Ops)-1].Kind)
}
