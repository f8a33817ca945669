package recompute_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/layouts"
	"github.com/spillway-ml/spillway/memplan"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/recompute"
)

// differentiated returns a small model's step of one micro-batch.
func differentiated(t *testing.T, c model.Config) *graph.Program {
	t.Helper()
	p, err := model.Build(c, model.Train, 2, 64)
	require.NoError(t, err)
	p, err = graph.Differentiate(p)
	require.NoError(t, err)
	p.Sections[0].Become(graph.SectionTrain)
	return graph.Fuse(p)
}

func gpt2(layers int) model.Config {
	return model.Config{Family: model.GPT2, Layers: layers, Width: 64, Heads: 2, Vocab: 97, Positions: 64, TiedHead: true, ResidDropout: 0.1, EmbdDropout: 0.1}
}

func llama(layers int) model.Config {
	return model.Config{Family: model.Llama, Layers: layers, Width: 64, Heads: 2, KVHeads: 1, FFN: 96, Vocab: 97, Positions: 64}
}

func rewrite(t *testing.T, p *graph.Program, policy string) *graph.Program {
	t.Helper()
	opt, err := recompute.Parse(policy)
	require.NoError(t, err)
	before := graph.Format(p)
	q, err := recompute.Rewrite(p, opt)
	require.NoError(t, err)
	require.Equal(t, before, graph.Format(p), "the input is left alone")
	require.NoError(t, graph.Verify(q))
	return q
}

// clones lists the recomputed operations. Each line is a run of them and the backward operation
// that follows it.
func clones(p *graph.Program) string {
	var lines []string
	var run []string
	for _, op := range p.Sections[0].Phases[0].Ops {
		if op.Pass == graph.Recompute {
			run = append(run, op.Source)
		} else if len(run) > 0 {
			lines = append(lines, strings.Join(run, " ")+" | "+op.Name)
			run = nil
		}
	}
	return strings.Join(lines, "\n")
}

func golden(text string) string {
	var lines []string
	for _, l := range strings.Split(strings.TrimSpace(text), "\n") {
		lines = append(lines, strings.TrimSpace(l))
	}
	return strings.Join(lines, "\n")
}

func TestFullKeepsUnitInputs(t *testing.T) {
	q := rewrite(t, differentiated(t, gpt2(2)), "full")
	require.Equal(t, golden(`
		h.1.ln_1 h.1.attn.c_attn h.1.attn h.1.attn.c_proj h.1.attn.resid_dropout h.1.attn.add h.1.ln_2 h.1.mlp.c_fc | h.1.mlp.c_proj/dw
		h.0.ln_1 h.0.attn.c_attn h.0.attn h.0.attn.c_proj h.0.attn.resid_dropout h.0.attn.add h.0.ln_2 h.0.mlp.c_fc | h.0.mlp.c_proj/dw`),
		clones(q))
}

func TestSelectiveKeepsMatrixProducts(t *testing.T) {
	q := rewrite(t, differentiated(t, gpt2(1)), "selective")
	require.Equal(t, golden(`
		h.0.mlp.c_fc | h.0.mlp.c_proj/dw
		h.0.ln_2 | h.0.mlp.c_fc/dw
		h.0.attn | h.0.attn.c_proj/dw
		h.0.ln_1 | h.0.attn.c_attn/dw`), clones(q))
	for _, op := range q.Sections[0].Phases[0].Ops {
		if op.Pass == graph.Recompute {
			require.NotEqual(t, graph.Linear, op.Kind, op.Name)
		}
		if op.Name == "h.0.mlp.c_fc/recompute" {
			require.Equal(t, graph.Activation, op.Kind, "the activation of a kept product, not the product")
		}
	}
	q = rewrite(t, differentiated(t, llama(1)), "selective")
	for _, op := range q.Sections[0].Phases[0].Ops {
		if op.Pass == graph.Recompute {
			require.Contains(t, []graph.Kind{graph.RMSNorm, graph.SwiGLU, graph.Attention}, op.Kind, op.Name)
		}
	}
	require.NotEmpty(t, clones(q))
}

// In a Llama, rotation works in place. Its clone must change only buffers that an earlier clone of
// the same run has written.
func TestClonesInPlace(t *testing.T) {
	q := rewrite(t, differentiated(t, llama(2)), "full:h.1")
	seen := 0
	written := map[graph.BufID]bool{}
	for _, op := range q.Sections[0].Phases[0].Ops {
		if op.Pass != graph.Recompute {
			clear(written)
		} else {
			for _, o := range op.Out {
				root, _ := q.Resolve(o.Buf, nil)
				if o.Mode != graph.Write {
					require.True(t, written[root], "%s changes %s, which no clone has made", op.Name, q.Buf(o.Buf).Name)
				}
				written[root] = true
			}
		}
		if op.Pass == graph.Recompute && op.Kind == graph.Rope {
			seen++
			require.Equal(t, op.In[0], op.Out[0].Buf)
			require.Equal(t, graph.ReadWrite, op.Out[0].Mode)
			require.Contains(t, q.Buf(op.In[0]).Name, "/recompute")
		}
		require.False(t, op.Pass == graph.Recompute && q.Units[op.Unit].Name != "h.1", op.Name)
	}
	require.Equal(t, 2, seen)
}

// Clones write only to new buffers, never over buffers of the forward.
func TestClonesWriteFreshBytes(t *testing.T) {
	q := rewrite(t, differentiated(t, gpt2(1)), "full")
	for _, op := range q.Sections[0].Phases[0].Ops {
		if op.Pass == graph.Recompute {
			for _, o := range op.Out {
				if o.Buf != graph.NoBuf {
					require.Contains(t, q.Buf(o.Buf).Name, "/recompute", op.Name)
				}
			}
		}
	}
}

func TestPeakFallsWithThePolicy(t *testing.T) {
	for _, c := range []model.Config{gpt2(6), llama(6)} {
		p := differentiated(t, c)
		last := int64(1) << 62
		for _, policy := range []string{"none", "selective", "full"} {
			l, err := layouts.Assign(rewrite(t, p, policy), memplan.Options{})
			require.NoError(t, err)
			require.Less(t, l.Spaces[graph.Device].Peak, last, policy)
			last = l.Spaces[graph.Device].Peak
		}
	}
}

// Under full, each further layer keeps only its input: batch · tokens · width elements.
func TestFullKeepsOneInputALayer(t *testing.T) {
	peak := func(layers int) int64 {
		l, err := layouts.Assign(rewrite(t, differentiated(t, gpt2(layers)), "full"), memplan.Options{Align: 4})
		require.NoError(t, err)
		return l.Spaces[graph.Device].ClassPeak[graph.Activations]
	}
	require.Equal(t, int64(2*64*64*4), peak(7)-peak(6))
}

func TestParseRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"full;auto": "auto stands alone", "most": `"most" is not known`, "full:": "not a pattern", "full:[": "not a pattern",
		"drop": "names of buffers", "drop:h.{3}": "range of numbers", "drop:": "empty",
	} {
		_, err := recompute.Parse(text)
		require.ErrorContains(t, err, want)
	}
	opt, err := recompute.Parse("full:nothing")
	require.NoError(t, err)
	_, err = recompute.Rewrite(differentiated(t, gpt2(1)), opt)
	require.ErrorContains(t, err, `no unit matches "nothing"`)
	require.ErrorContains(t, err, "h.0")
}
