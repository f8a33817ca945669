package model

import (
	"fmt"
	"math"

	"github.com/spillway-ml/spillway/graph"
)

// gpt2 writes GPT-2 (Radford et al. 2019; names and shapes of Hugging Face's
// GPT2LMHeadModel without the prefix "transformer."). Its Conv1D weights are
// (in, out). N = B·T, C the width, F the MLP's, V the vocabulary.
func (w *writer) gpt2() {
	c := w.c
	width, ffn, vocab := int64(c.Width), int64(c.FFN), int64(c.Vocab)

	w.Unit("embed")
	wte := w.Param("wte.weight", w.normal(), vocab, width)
	x := w.Embed("wte", w.Tokens(w.batch, w.seq), wte) // (N,C)
	w.Unit("pos")
	wpe := w.Param("wpe.weight", w.normal(), int64(c.Positions), width)
	x = w.positions("wpe", x, wpe)
	x = w.dropout("drop", x, c.EmbdDropout)

	// Two projections a block add to the residual stream.
	residual := graph.Normal(c.InitStd / math.Sqrt(2*float64(c.Layers)))
	attn := graph.AttentionAttr{
		Batch: w.batch, Seq: w.seq, Heads: int64(c.Heads), KVHeads: int64(c.Heads), HeadDim: int64(c.HeadDim),
		Scale: 1 / math.Sqrt(float64(c.HeadDim)), Causal: true,
	}
	for i := range c.Layers {
		h := fmt.Sprintf("h.%d", i)
		w.Block("h", i)
		a := w.layerNorm(h+".ln_1", x)                                 // (N,C)
		a = w.conv1D(h+".attn.c_attn", a, w.normal(), width, 3*width)  // (N,3C)
		a = w.attend(h+".attn", a, graph.Value{}, graph.Value{}, attn) // (N,C)
		a = w.conv1D(h+".attn.c_proj", a, residual, width, width)      // (N,C)
		a = w.dropout(h+".attn.resid_dropout", a, c.ResidDropout)      //
		x = w.Add(h+".attn.add", x, a)                                 // (N,C)
		a = w.layerNorm(h+".ln_2", x)                                  // (N,C)
		a = w.conv1D(h+".mlp.c_fc", a, w.normal(), width, ffn)         // (N,F)
		a = w.Activation(h+".mlp.act", a, c.Act)                       // (N,F)
		a = w.conv1D(h+".mlp.c_proj", a, residual, ffn, width)         // (N,C)
		a = w.dropout(h+".mlp.dropout", a, c.ResidDropout)             //
		x = w.Add(h+".mlp.add", x, a)                                  // (N,C)
	}
	w.Unit("norm")
	x = w.layerNorm("ln_f", x)
	if c.TiedHead {
		w.Unit("embed")
		w.head(x, wte)
		return
	}
	w.Unit("head")
	w.head(x, w.Param("lm_head.weight", w.normal(), vocab, width))
}

func (w *writer) layerNorm(name string, x graph.Value) graph.Value {
	n := int64(w.c.Width)
	gamma := w.Param(name+".weight", graph.Ones, n)
	return w.LayerNorm(name, x, gamma, w.Param(name+".bias", graph.Zeros, n), w.c.NormEps)
}

// conv1D is Hugging Face's name for a linear layer with its weight (in, out).
func (w *writer) conv1D(name string, x graph.Value, init graph.Init, in, out int64) graph.Value {
	weight := w.Param(name+".weight", init, in, out)
	return w.Linear(name, x, weight, w.Param(name+".bias", graph.Zeros, out), graph.LinearAttr{})
}
