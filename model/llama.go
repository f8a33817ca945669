package model

import (
	"fmt"
	"math"

	"github.com/spillway-ml/spillway/graph"
)

// llama writes the Llama family (Touvron et al. 2023, Grattafiori et al. 2024;
// names and shapes of Hugging Face's LlamaForCausalLM, and of its relatives: Qwen2's
// with biases on queries, keys and values, Qwen3's with norms of queries and keys,
// OLMo 2's with these and norms after attention and MLP). Weights are (out, in). N = B·T, C the width, D of a
// head.
func (w *writer) llama() {
	c := w.c
	width, ffn, vocab := int64(c.Width), int64(c.FFN), int64(c.Vocab)
	q, kv := int64(c.Heads*c.HeadDim), int64(c.KVHeads*c.HeadDim)

	w.Unit("embed")
	table := w.Param("model.embed_tokens.weight", w.normal(), vocab, width)
	x := w.Embed("model.embed_tokens", w.Tokens(w.batch, w.seq), table) // (N,C)

	attn := graph.AttentionAttr{
		Batch: w.batch, Seq: w.seq, Heads: int64(c.Heads), KVHeads: int64(c.KVHeads), HeadDim: int64(c.HeadDim),
		Scale: 1 / math.Sqrt(float64(c.HeadDim)), Causal: true,
	}
	for i := range c.Layers {
		w.Block("h", i)
		h := fmt.Sprintf("model.layers.%d", i)
		sa, mlp := h+".self_attn", h+".mlp"
		a := x
		if !c.PostNorm {
			a = w.rmsNorm(h+".input_layernorm", x) // (N,C)
		}
		qs := w.project(sa+".q_proj", a, width, q, c.QKVBias)  // (N,Heads·D)
		ks := w.project(sa+".k_proj", a, width, kv, c.QKVBias) // (N,KVHeads·D)
		vs := w.project(sa+".v_proj", a, width, kv, c.QKVBias) // (N,KVHeads·D)
		qs = w.normQK(sa+".q_norm", qs, c.Heads)
		ks = w.normQK(sa+".k_norm", ks, c.KVHeads)
		qs = w.turn(sa+".q_rope", qs, c.Heads)
		ks = w.turn(sa+".k_rope", ks, c.KVHeads)
		a = w.attend(sa, qs, ks, vs, attn)                  // (N,Heads·D)
		a = w.project(sa+".o_proj", a, q, width, c.OutBias) // (N,C)
		if c.PostNorm {
			a = w.rmsNorm(h+".post_attention_layernorm", a)
		}
		a = w.dropout(sa+".dropout", a, c.ResidDropout) //
		x = w.Add(sa+".add", x, a)                      // (N,C)
		a = x
		if !c.PostNorm {
			a = w.rmsNorm(h+".post_attention_layernorm", x) // (N,C)
		}
		gate := w.project(mlp+".gate_proj", a, width, ffn, c.MLPBias) // (N,F)
		up := w.project(mlp+".up_proj", a, width, ffn, c.MLPBias)     // (N,F)
		a = w.SwiGLU(mlp+".swiglu", gate, up)                         // (N,F)
		a = w.project(mlp+".down_proj", a, ffn, width, c.MLPBias)     // (N,C)
		if c.PostNorm {
			a = w.rmsNorm(h+".post_feedforward_layernorm", a)
		}
		a = w.dropout(mlp+".dropout", a, c.ResidDropout) //
		x = w.Add(mlp+".add", x, a)                      // (N,C)
	}
	w.Unit("norm")
	x = w.rmsNorm("model.norm", x)
	if c.TiedHead {
		w.Unit("embed")
		w.head(x, table)
		return
	}
	w.Unit("head")
	w.head(x, w.Param("lm_head.weight", w.normal(), vocab, width))
}

func (w *writer) rmsNorm(name string, x graph.Value) graph.Value {
	return w.RMSNorm(name, x, w.Param(name+".weight", graph.Ones, int64(w.c.Width)), w.c.NormEps)
}

// normQK is an RMS norm of queries or keys x (N, heads·D): of each head by itself,
// with one weight (D), or of all together, with a weight (heads·D).
func (w *writer) normQK(name string, x graph.Value, heads int) graph.Value {
	d := int64(w.c.HeadDim)
	width := int64(heads) * d
	switch {
	case w.c.NormQK:
		return w.RMSNorm(name, x, w.Param(name+".weight", graph.Ones, width), w.c.NormEps)
	case w.c.NormHeads:
		rows := w.batch * w.seq
		x = w.Reshape(name+".heads", x, rows*int64(heads), d)
		x = w.RMSNorm(name, x, w.Param(name+".weight", graph.Ones, d), w.c.NormEps)
		return w.Reshape(name+".rows", x, rows, width)
	}
	return x
}

// project is a linear layer with its weight (out, in).
func (w *writer) project(name string, x graph.Value, in, out int64, bias bool) graph.Value {
	weight := w.Param(name+".weight", w.normal(), out, in)
	var b graph.Value
	if bias {
		b = w.Param(name+".bias", graph.Zeros, out)
	}
	return w.Linear(name, x, weight, b, graph.LinearAttr{TransW: true})
}

func (w *writer) rope(heads int) graph.RopeAttr {
	a := graph.RopeAttr{Heads: int64(heads), HeadDim: int64(w.c.HeadDim), Seq: w.seq, Theta: w.c.RopeTheta}
	if s := w.c.RopeScaling; s != nil {
		a.ScaleFactor, a.LowFreq, a.HighFreq, a.OriginalPositions = s.Factor, s.LowFreq, s.HighFreq, int64(s.OriginalPositions)
	}
	return a
}
