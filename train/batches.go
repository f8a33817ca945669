package train

import (
	"fmt"

	"github.com/spillway-ml/spillway/data"
)

// batches is an opened data set and the order in which a run reads it.
type batches struct {
	sampler *data.Sampler
	source  data.Source
	buffer  *data.Buffer // nil for a Source that the caller brought
	perRank int64        // targets of one micro-batch of one rank, all counted; −1: they must be counted
	scratch [2][]int32
}

// openData opens the training and held-out data and the tokenizer.
func (t *Trainer) openData() error {
	c := &t.cfg
	var err error
	if err = t.openTokenizer(); err != nil {
		return err
	}
	switch {
	case c.Inference:
	case c.Data == "":
		return fmt.Errorf("--data is missing: give a token file (*.bin), a text file, or a folder of text files")
	default:
		if t.train, err = t.open("data", c.Data, c.Accum); err != nil {
			return err
		}
	}
	if c.EvalData != "" {
		if t.eval, err = t.open("eval-data", c.EvalData, c.evalAccum()); err != nil {
			return err
		}
	}
	return nil
}

func (t *Trainer) open(flag, path string, accum int) (*batches, error) {
	c := &t.cfg
	glob := c.DataGlob
	if flag == "eval-data" {
		glob = c.EvalGlob
	}
	buf, err := data.Open(path, data.Options{Tokenizer: t.tokenizer, Vocab: t.model.Vocab, Glob: glob, TextField: c.TextField, Threads: c.threads()})
	if err != nil {
		return nil, fmt.Errorf("--%s: %w", flag, err)
	}
	if left := buf.LeftOut(); left != "" {
		t.notes = append(t.notes, fmt.Sprintf("--%s %s: left out %s", flag, path, left))
	}
	order := data.DefaultOrder(path)
	if c.Order != "" {
		if order, err = data.ParseOrder(c.Order); err != nil {
			return nil, fmt.Errorf("--order: %w", err)
		}
	}
	if flag == "eval-data" {
		order = data.Sequential
	}
	b := &batches{source: buf, buffer: buf, perRank: int64(c.Batch) * int64(c.Seq)}
	if c.Inference && buf.Len() > 1 {
		rows := int64(c.Batch) * int64(c.Ranks)
		rows *= (data.WholeRows(buf, c.Seq) + rows - 1) / rows
		b.source, b.perRank = data.Whole(buf, c.Seq, rows), -1
		b.scratch = [2][]int32{make([]int32, c.Batch*c.Seq), make([]int32, c.Batch*c.Seq)}
		c.EvalSteps = int(rows / int64(c.Batch) / int64(c.Ranks))
	}
	b.sampler, err = data.NewSampler(b.source, data.SamplerConfig{Order: order, Seed: c.Seed, Seq: c.Seq, Batch: c.Batch, Accum: accum, Ranks: c.Ranks, Vocab: t.model.Vocab})
	if err != nil {
		buf.Close()
		return nil, fmt.Errorf("--%s: %w", flag, err)
	}
	return b, nil
}

func (b *batches) fill(step, micro, rank int, inputs, targets []int32) error {
	return b.sampler.Fill(step, micro, rank, inputs, targets)
}

// countTargets returns the counted targets of a step's global batch.
func (b *batches) countTargets(step, accum, ranks int) (int64, error) {
	if b.perRank >= 0 {
		return b.perRank * int64(accum) * int64(ranks), nil
	}
	var n int64
	for micro := range accum {
		for rank := range ranks {
			if err := b.sampler.Fill(step, micro, rank, b.scratch[0], b.scratch[1]); err != nil {
				return 0, err
			}
			for _, v := range b.scratch[1] {
				if v >= 0 {
					n++
				}
			}
		}
	}
	return n, nil
}

func (b *batches) close() error {
	if b.buffer == nil {
		return nil
	}
	return b.buffer.Close()
}
