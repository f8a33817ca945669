package model

import (
	"fmt"
	"math"

	"github.com/spillway-ml/spillway/graph"
)

// Kind is the purpose of a program.
type Kind uint8

// Kinds of programs; only Train has dropout. Generate has one row and returns the logits after
// position Key[KeyRow]. Next has one token of each row, at its Positions, and returns the logits
// after it; it uses cached keys and values of up to seq earlier tokens, for row b in slot b. Prompt
// computes consecutive tokens of one row, at their Positions, and caches their keys and values in
// slot Key[KeySlot] for Next; it has no logits.
const (
	Train Kind = iota
	Eval
	Generate
	Prompt
	Next
)

var sections = [...]graph.SectionKind{graph.SectionForward, graph.SectionEval, graph.SectionGenerate, graph.SectionGenerate, graph.SectionGenerate}

// Build writes the forward program for batch rows of seq tokens (classifiers: batch samples, seq 1
// or 0). Its one section is "forward" for Train, "eval", or "generate". The parameters are the same
// in all three, in the same order, under Hugging Face's names and shapes.
//
// A language model's units are "embed", "pos" (GPT-2), "h.0", "h.1" …, "norm" and, without
// TiedHead, "head"; a tied head uses the parameter of "embed". Classifiers have a unit for each
// layer, "layer.0" ….
//
// Random weights are N(0, InitStd²), and in a GPT-2 the projections onto the residual stream are
// N(0, InitStd²/(2·Layers)). Norms and biases are ones and zeros. This is as in Hugging Face's
// transformers, also for GPT-2's position table, for which OpenAI's code has 0.01. Classifiers
// follow He et al. 2015.
func Build(c Config, kind Kind, batch, seq int) (*graph.Program, error) {
	b := graph.NewBuilder()
	if err := Write(b, c, kind, batch, seq); err != nil {
		return nil, err
	}
	p, err := b.Program()
	if err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	if kind == Next {
		p.Sections[0].Form = graph.FormNext
	}
	p.Sections[0].Become(sections[kind])
	return p, nil
}

// Write is Build onto a given builder, for a program that adds operations. The builder reports
// errors in the program.
func Write(b *graph.Builder, c Config, kind Kind, batch, seq int) error {
	if err := c.Validate(); err != nil {
		return err
	}
	c = c.withDefaults()
	if kind > Next {
		return fmt.Errorf("model: program kind is %d, want Train, Eval, Generate, Prompt or Next", kind)
	}
	if batch < 1 || batch > maxBatch {
		return fmt.Errorf("model: batch is %d, want 1 to %d", batch, maxBatch)
	}
	w := &writer{Builder: b, c: c, kind: kind, batch: int64(batch), seq: int64(seq), kept: int64(seq), slots: int64(batch)}
	switch kind {
	case Next:
		w.seq = 1
	case Prompt:
		w.batch, w.seq = 1, int64(PromptRows(seq))
	}
	a := c.Arch()
	switch {
	case a.Classifier && kind >= Generate:
		return fmt.Errorf("model: a classifier (%s) generates nothing; want Train or Eval", c.Family)
	case a.Classifier && (seq > 1 || seq < 0):
		return fmt.Errorf("model: seq is %d; a classifier (%s) has one target a sample, so want 1", seq, c.Family)
	case !a.Classifier && (seq < 1 || seq > c.Positions):
		return fmt.Errorf("model: seq is %d, want 1 to the model's %d positions", seq, c.Positions)
	case kind == Generate && batch != 1:
		return fmt.Errorf("model: batch is %d, want 1: without kept keys and values generation follows one row", batch)
	}
	if c.Documents && kind < Generate && !a.Classifier {
		w.Documents(w.Input(Starts, w.batch, w.seq))
	}
	a.forward(w)
	return nil
}

// Starts is the name of the input that gives, for each token, the index in its row of its
// document's first token. It exists if rows hold several documents (Config.Documents).
const Starts = "starts"

// writer is a Builder for a given model.
type writer struct {
	*graph.Builder
	c           Config
	kind        Kind
	batch, seq  int64 // rows, and tokens per row
	slots, kept int64 // for Prompt and Next: number of cached rows, and positions per row
}

func (w *writer) normal() graph.Init { return graph.Normal(w.c.InitStd) }

// dropout applies dropout in Train programs and is the identity in others.
func (w *writer) dropout(name string, x graph.Value, p float64) graph.Value {
	if w.kind != Train || p == 0 {
		return x
	}
	return w.Dropout(name, x, p, w.batch, graph.InPlace)
}

// attention returns the attribute of causal attention with scores scaled by 1/√scalar.
func (w *writer) attention(scalar float64) graph.AttentionAttr {
	c := w.c
	return graph.AttentionAttr{
		Batch: w.batch, Seq: w.seq, Heads: int64(c.Heads), KVHeads: int64(c.KVHeads), HeadDim: int64(c.HeadDim),
		Scale: 1 / math.Sqrt(scalar), Causal: true,
	}
}

// head ends a language model with the loss, the logits or nothing, by kind. Its matrix is the
// embedding's table (V,C), or without TiedHead a separate one; limit is a soft cap on the logits, 0
// for none.
func (w *writer) head(x, table graph.Value, limit float64) {
	if w.c.TiedHead {
		w.Unit("embed")
	} else {
		w.Unit("head")
		table = w.Param("lm_head.weight", w.normal(), int64(w.c.Vocab), int64(w.c.Width))
	}
	if w.kind < Generate {
		if limit == 0 {
			w.HeadLoss("head", x, table, w.Targets(w.batch, w.seq))
		} else {
			w.CappedHeadLoss("head", x, table, w.Targets(w.batch, w.seq), limit)
		}
		return
	}
	if w.kind == Prompt {
		return
	}
	row := x
	if w.kind == Generate {
		row = w.SelectRow("head.row", x)
	}
	logits := w.Linear("head", row, table, graph.Value{}, graph.LinearAttr{TransW: true})
	if limit != 0 {
		logits = w.SoftCap("head.cap", logits, limit, graph.InPlace)
	}
	w.Logits(logits)
}
