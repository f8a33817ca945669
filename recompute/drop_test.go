package recompute_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan"
	"github.com/spillway-ml/spillway/recompute"
)

func TestDropByName(t *testing.T) {
	p := differentiated(t, gpt2(3))
	q := rewrite(t, p, "drop:h.{0-1}.ln_1,h.1.mlp.act")
	require.Equal(t, golden(`
		h.1.mlp.c_fc | h.1.mlp.c_proj/dw
		h.1.ln_1 | h.1.attn.c_attn/dw
		h.0.ln_1 | h.0.attn.c_attn/dw`), clones(q))
	for _, op := range q.Sections[0].Phases[0].Ops {
		if op.Name == "h.1.mlp.c_fc/recompute" {
			require.Equal(t, graph.Activation, op.Kind, "its pre-activation is kept")
		}
	}
	// If its pre-activation is dropped too, the product is recomputed once.
	q = rewrite(t, p, "drop:h.1.mlp.act,h.1.mlp.c_fc")
	require.Equal(t, golden(`h.1.mlp.c_fc | h.1.mlp.c_proj/dw`), clones(q))
	for _, op := range q.Sections[0].Phases[0].Ops {
		if op.Name == "h.1.mlp.c_fc/recompute" {
			require.Equal(t, graph.Linear, op.Kind)
		}
	}
	// Together with a policy by unit.
	q = rewrite(t, p, "full:h.0;drop:h.2.ln_2")
	require.Contains(t, clones(q), "h.2.ln_2 | h.2.mlp.c_fc/dw")
	require.Contains(t, clones(q), "h.0.attn.c_attn")
}

// Dropping every candidate by name recomputes the same operations as full.
func TestDropAllIsFull(t *testing.T) {
	p := differentiated(t, llama(3))
	require.Equal(t, clones(rewrite(t, p, "full:h.*")), clones(rewrite(t, p, "drop:model.layers.*")))
}

func TestDropRefusesWhatItCannotDo(t *testing.T) {
	p := differentiated(t, gpt2(2))
	for _, text := range []string{"drop:h.7.mlp.act", "drop:h.*.mlp.add", "drop:nothing"} {
		opt, err := recompute.Parse(text)
		require.NoError(t, err)
		_, err = recompute.Rewrite(p, opt)
		require.ErrorContains(t, err, "no activation that can be computed again matches")
		require.Contains(t, err.Error(), "; the nearest are h.")
		require.ErrorContains(t, err, "h.*.mlp.act", "the choices are named")
		require.NotContains(t, err.Error()[80:], "h.*.mlp.add", "what one layer hands to the next")
	}
}

// Dropping one candidate recomputes exactly the operations that Candidates lists for it, and
// reduces the bytes held for the backward by its size.
func TestCandidates(t *testing.T) {
	for _, p := range []*graph.Program{differentiated(t, gpt2(4)), unrounded(t, differentiated(t, gpt2(4))), differentiated(t, llama(4))} {
		list, err := recompute.Candidates(p)
		require.NoError(t, err)
		before, err := memplan.Analyse(rewrite(t, p, "none"))
		require.NoError(t, err)
		dropped := 0
		for _, c := range list {
			require.Equal(t, p.Buf(c.Buf).Bytes(), c.Bytes)
			if c.Ops == nil || p.Units[c.Unit].Name != "h.0" {
				continue
			}
			dropped++
			q := rewrite(t, p, "drop:"+c.Name)
			var kinds, want []graph.Kind
			for _, op := range q.Sections[0].Phases[0].Ops {
				if op.Pass == graph.Recompute {
					kinds = append(kinds, op.Kind)
				}
			}
			for _, op := range c.Ops {
				want = append(want, op.Kind)
			}
			require.Equal(t, want, kinds, c.Name)
			after, err := memplan.Analyse(q)
			require.NoError(t, err)
			require.LessOrEqual(t, after.Bounds()[graph.Device].ClassPeak[graph.Activations], before.Bounds()[graph.Device].ClassPeak[graph.Activations]-c.Bytes, c.Name)
		}
		require.GreaterOrEqual(t, dropped, 6)
	}
}

// unrounded makes the program's GELUs operate on unrounded sums.
func unrounded(t *testing.T, p *graph.Program) *graph.Program {
	t.Helper()
	n := 0
	for i := range p.Sections[0].Phases[0].Ops {
		if op := &p.Sections[0].Phases[0].Ops[i]; op.Kind == graph.Linear && op.Attr.(graph.LinearAttr).Act == graph.ActGELUTanh {
			op.Kind = graph.LinearAct
			n++
		}
	}
	require.Positive(t, n)
	return p
}

// A GELU of an unrounded sum is recomputed only together with its product, never from a kept
// pre-activation, which is rounded and would give other bits.
func TestAGELUOfTheUnroundedSumIsMadeByItsProductAlone(t *testing.T) {
	p := unrounded(t, differentiated(t, gpt2(2)))
	for policy, again := range map[string]int{
		"none": 0, "selective": 0, "full": 2, "drop:h.*.mlp.act": 2, "drop:h.*.mlp.c_fc": 2, "drop:h.1.mlp.act,h.1.mlp.c_fc": 1,
		"selective:h.0;full:h.1": 1, "selective;drop:h.0.mlp.act": 1,
	} {
		n := 0
		for _, op := range rewrite(t, p, policy).Sections[0].Phases[0].Ops {
			require.NotEqual(t, graph.Activation, op.Kind, "%s: %s", policy, op.Name)
			if op.Pass == graph.Recompute && op.Kind == graph.LinearAct {
				n++
			}
		}
		require.Equal(t, again, n, policy)
	}
	// Dropping the activation drops the other output of the same product too: the argument of its
	// derivative.
	require.Equal(t, clones(rewrite(t, p, "drop:h.0.mlp.act,h.0.mlp.c_fc")), clones(rewrite(t, p, "drop:h.0.mlp.act")))
	list, err := recompute.Candidates(p)
	require.NoError(t, err)
	seen := 0
	for _, c := range list {
		if c.Name != "h.0.mlp.act" && c.Name != "h.0.mlp.c_fc" {
			continue
		}
		seen++
		require.Len(t, c.Ops, 1)
		require.Equal(t, graph.LinearAct, c.Ops[0].Kind)
	}
	require.Equal(t, 2, seen)
}
