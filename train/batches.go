package train

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/dustin/go-humanize/english"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/data/token"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/planner"
)

// Template returns the configured chat template for conversations; "" means the model's.
func (b *batches) Template() string { return b.template }

// trainField names the training data.
const trainField = "Config.Data"

// evalDataField names the held-out data.
const evalDataField = "Config.EvalData"

// ownField and evalField name training and held-out data that the program provides.
const ownField, evalField = "Config.Own.Data", "Config.Own.Eval"

// openData opens the training and held-out data and the tokenizer.
func (t *Trainer) openData(ctx context.Context) error {
	conversations, err := t.conversations()
	if err != nil {
		return err
	}
	c := t.cfg
	if t.tokenizer, err = openTokenizer(&c.Config, c.opened, c.Shape.Vocab); err != nil {
		return err
	}
	if t.tokenizer != nil {
		t.notes = append(t.notes, token.SpecialsOf(t.tokenizer).Notes...)
	}
	switch {
	case c.Inference:
	case c.Own.Data != nil:
		if t.train, err = t.openSamples(ownField, c.Own.Data); err != nil {
			return err
		}
	case conversations:
		if t.train, err = t.openChat(ctx, trainField, c.Data, c.DataGlob, false); err != nil {
			return err
		}
	case c.Data == "":
		return config.ErrNoData
	default:
		if t.train, err = t.open(ctx, trainField, c.Data, false); err != nil {
			return err
		}
	}
	t.countSteps()
	if c.EvalSplit > 0 && !c.Inference {
		if conversations {
			t.eval, err = t.openChat(ctx, trainField, c.Data, c.DataGlob, true)
		} else {
			t.eval, err = t.open(ctx, trainField, c.Data, true)
		}
		return err
	}
	if c.Own.Eval != nil {
		t.eval, err = t.openSamples(evalField, c.Own.Eval)
		return err
	}
	if ok, err := data.IsConversations(c.EvalData, data.Options{TextField: c.TextField, Glob: c.EvalGlob}); err != nil {
		return fmt.Errorf("Config.EvalData: %w", err)
	} else if ok {
		t.eval, err = t.openChat(ctx, evalDataField, c.EvalData, c.EvalGlob, false)
		return err
	}
	if c.EvalData != "" {
		if t.eval, err = t.open(ctx, evalDataField, c.EvalData, false); err != nil {
			return err
		}
	}
	return nil
}

// countSteps sets Steps to the number that Config.Epochs needs from the current sample on.
func (t *Trainer) countSteps() {
	c := t.cfg
	if c.Epochs == 0 || t.train == nil {
		return
	}
	s := t.train.sampler
	steps := max(t.at.Step, s.StepAt(int64(c.Epochs)*s.Windows()))
	if t.at.Step > 0 && steps == c.Steps {
		return // a resumed run keeps its Steps
	}
	t.cfg = c.with(c.Tokenizer, c.Order, steps)
}

// lengthNotes returns notes about a training run whose Steps are known: the number of steps that
// Config.Epochs needs, and fields that change nothing.
func (t *Trainer) lengthNotes() (notes []string) {
	c := t.cfg
	if c.Inference {
		return nil
	}
	if c.Epochs > 0 {
		s := t.train.sampler
		each := fmt.Sprintf("%d a step", s.Rows(0))
		if len(c.BatchSchedule) > 0 {
			each = "as many a step as Config.BatchSchedule says"
		}
		notes = append(notes, fmt.Sprintf("%s of %s, %s: %s", english.Plural(c.Epochs, "epoch", ""),
			english.Plural(int(s.Windows()), "row", ""), each, english.Plural(c.Steps, "step", "")))
	}
	return append(notes, c.IdleNotes()...)
}

// readText opens the files of tokens or text; held selects the held-out documents.
func (t *Trainer) readText(ctx context.Context, field, path string, held bool) (*data.Buffer, data.Options, error) {
	c := t.cfg
	glob := c.DataGlob
	if field == evalDataField {
		glob = c.EvalGlob
	}
	o := data.Options{Tokenizer: t.tokenizer, Vocab: t.cfg.Shape.Vocab, Glob: glob, TextField: c.TextField, Threads: c.ComputeThreads()}
	if c.EvalSplit > 0 && field == trainField {
		o.Split = &data.Split{Seed: c.Seed, Share: c.EvalSplit, Held: held}
	}
	buf, err := data.Open(ctx, path, o)
	if err != nil {
		return nil, o, fmt.Errorf("%s: %w", field, err)
	}
	return buf, o, nil
}

// open opens tokens or text; held selects the held-out documents.
func (t *Trainer) open(ctx context.Context, field, path string, held bool) (*batches, error) {
	c := t.cfg
	if s := planner.SampleShape(t.plan.Program, c.Batch); s.Tokens != c.Seq || s.Targets != c.Seq || len(s.Inputs) > 0 && !c.Packs() {
		return nil, fmt.Errorf("%s %.80q: model %.80q takes more than tokens and the next ones, which are all that files have; it needs data of its own (Config.Own)", field, path, c.ModelName())
	}
	buf, o, err := t.readText(ctx, field, path, held)
	if err != nil {
		return nil, err
	}
	if o.Split != nil {
		what := "for training"
		if held {
			what, field = "held out", evalDataField
		}
		t.notes = append(t.notes, fmt.Sprintf("%s %s: %d of %d documents %s: %d tokens", trainField, path, o.Split.Taken, o.Split.Seen, what, buf.Len()))
	}
	if left := buf.LeftOut(); left != "" && !held {
		t.notes = append(t.notes, fmt.Sprintf("%s %s: left out %s", field, path, left))
	}
	if err := t.noteEnds(field, path, buf); err != nil {
		return nil, err
	}
	order := data.DefaultOrder(path)
	if c.Order != "" {
		if order, err = data.ParseOrder(c.Order); err != nil {
			return nil, fmt.Errorf("Config.Order: %w", err)
		}
	}
	if heldOut(field) {
		order = data.Sequential
	}
	b := &batches{source: buf, buffer: buf, all: true, steps: c.EvalSteps}
	windows := (buf.Len() - 1) / int64(c.Seq)
	if heldOut(field) && (c.Inference && buf.Len() > 1 || windows > 0 && c.wraps(windows)) {
		rows := c.evalRows()
		b.steps = int((data.WholeRows(buf, c.Seq) + rows - 1) / rows)
		b.source, b.all = data.Whole(buf, c.Seq, int64(b.steps)*rows), false
		b.scratch = [2][]int32{make([]int32, c.Batch*c.Seq), make([]int32, c.Batch*c.Seq)}
	}
	b.sampler, err = data.NewSampler(b.source, c.sampling(order, field))
	if err != nil {
		buf.Close()
		return nil, fmt.Errorf("%s: %w", field, err)
	}
	return b, nil
}

// conversations says whether the training data are conversations. If so, it replaces the bytes
// tokenizer by one that also has an end token.
func (t *Trainer) conversations() (bool, error) {
	c := t.cfg
	chat, bytes := false, strings.EqualFold(c.Tokenizer, "bytes")
	for _, d := range []struct{ field, path, glob string }{{trainField, c.Data, c.DataGlob}, {evalDataField, c.EvalData, c.EvalGlob}} {
		is, err := data.IsConversations(d.path, data.Options{TextField: c.TextField, Glob: d.glob})
		if err != nil {
			return false, fmt.Errorf("%s: %w", d.field, err)
		}
		if is && !bytes && c.Tokenizer != "" { // the tokenizer of a saved model, which has no template
			tok, err := c.opened.OpenTokenizer(c.Tokenizer)
			if err != nil {
				return false, fmt.Errorf("Config.Tokenizer: %w", err)
			}
			bytes = tok.Name() == token.Bytes().Name()
		}
		if is && bytes {
			name, err := byteChat(d.field+" "+d.path, c.Shape.Vocab)
			if err != nil {
				return false, err
			}
			t.cfg = t.cfg.with(name, c.Order, c.Steps)
		}
		switch {
		case d.field == trainField:
			chat = is && !c.Inference && c.Own.Data == nil
		case c.Inference && (c.Template != "" || c.LossOn != "") && d.path != "" && !is:
			return false, noConversations(c.Given(), d.field, d.path)
		}
	}
	if given := c.Given(); !chat && given != "" && !c.Inference {
		return false, noConversations(given, trainField, c.Data)
	}
	if chat && c.Order == "" {
		t.cfg = t.cfg.with(t.cfg.Tokenizer, data.Shuffled.String(), c.Steps)
	}
	return chat, nil
}

// noConversations refuses a field of Config that is for conversations, with other data.
func noConversations(given, field, path string) error {
	if path != "" {
		if err := data.Readable(path); err != nil {
			return fmt.Errorf("%s: %w", field, err)
		}
	}
	return config.Refuse("Config.%s with %s %s: it holds no conversations (JSON lines or Parquet with messages, prompt and response, or instruction and output); leave it out", given, field, path)
}

// readChat reads conversations and the configured template; held selects the held-out ones.
func (t *Trainer) readChat(ctx context.Context, field, path, glob string, held bool) (*data.Conversations, string, error) {
	c := t.cfg
	if c.Own.Model != nil {
		return nil, "", config.Refuse("%s %.80q with Config.Own.Model: conversations are for language models with a config.json; give Config.Own.Data", field, path)
	}
	o := data.ChatOptions{All: c.CountsAll(), Seq: c.Seq, Drop: c.DropsLong(), Vocab: c.Shape.Vocab}
	if c.Packs() {
		o.Starts = model.Starts
	}
	if field == trainField {
		o.Split = data.Split{Seed: c.Seed, Share: c.EvalSplit, Held: held}
	}
	var err error
	if o.Template, err = readTemplate(&c.Config); err != nil {
		return nil, "", err
	}
	conv, err := data.OpenConversations(ctx, path, data.Options{Tokenizer: t.tokenizer, Glob: glob, Threads: c.ComputeThreads()}, o)
	if err != nil {
		return nil, "", fmt.Errorf("%s: %w", field, err)
	}
	return conv, o.Template, nil
}

// openChat opens conversations; held selects the held-out ones.
func (t *Trainer) openChat(ctx context.Context, field, path, glob string, held bool) (*batches, error) {
	conv, template, err := t.readChat(ctx, field, path, glob, held)
	if err != nil {
		return nil, err
	}
	what := field + " " + path
	if held {
		what += ", held out"
		field = evalDataField
	}
	t.notes = append(t.notes, fmt.Sprintf("%s: %s", what, conv.Summary()))
	if left := conv.LeftOut(); left != "" && !held {
		t.notes = append(t.notes, fmt.Sprintf("%s: left out %s", what, left))
	}
	b, err := t.openSamples(field, conv)
	if err != nil {
		return nil, errors.Join(err, conv.Close())
	}
	b.chat, b.template = conv, template
	return b, nil
}

// noteEnds warns of training data in which the tokenizer's end token never occurs.
func (t *Trainer) noteEnds(field, path string, buf *data.Buffer) error {
	if t.cfg.Inference || field != trainField || t.tokenizer == nil || t.tokenizer.EOT() < 0 {
		return nil
	}
	found, err := buf.Has(t.tokenizer.EOT())
	if err == nil && !found {
		t.notes = append(t.notes, fmt.Sprintf("%s %s: the end token %q (%d) never occurs, so the model does not learn to stop", field, path, t.tokenizer.Decode([]int32{t.tokenizer.EOT()}), t.tokenizer.EOT()))
	}
	return err
}

// openSamples opens data that the program provides.
func (t *Trainer) openSamples(field string, s data.Samples) (*batches, error) {
	c := t.cfg
	shape := planner.SampleShape(t.plan.Program, c.Batch)
	shape.Vocab, shape.Classes = t.cfg.Shape.Vocab, t.cfg.Shape.Vocab
	if c.Own.Model != nil {
		fwd, err := config.OwnForward(&c.Config, c.Common())
		if err != nil {
			return nil, err
		}
		shape.Vocab, shape.Classes = 0, 0
		planner.BoundsOf(&shape, fwd.Train)
	}
	order, rows, steps := data.Sequential, s.Len(), c.EvalSteps
	if rows < 1 && (field == ownField || field == evalField) {
		return nil, config.Refuse("%s: sample data: Len is %d, want at least 1 sample", field, rows)
	}
	if strings.EqualFold(c.Order, data.Shuffled.String()) && !heldOut(field) {
		order = data.Shuffled
	}
	if all := c.evalRows(); heldOut(field) && rows > 0 && (c.Inference || c.wraps(rows)) {
		switch {
		case rows%all == 0 || shape.Targets > 0:
			steps = int((rows + all - 1) / all)
			rows = int64(steps) * all
		case c.Inference:
			return nil, fmt.Errorf("%s: %d samples are no multiple of %d rows (Batch × Ranks), and a model without targets can't leave rows out", field, rows, all)
		default:
			steps = max(int(rows/all), 1)
			t.notes = append(t.notes, fmt.Sprintf("%s: %d samples, in evaluations of %s of %d: a model without "+
				"targets can't leave rows out", field, rows, english.Plural(steps, "batch", "batches"), all))
		}
	}
	r, err := data.NewSampleReader(s, shape, rows, c.sampling(order, field))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", field, err)
	}
	return &batches{sampler: r.Sampler, samples: r, steps: steps}, nil
}

// heldOut says whether a field names held-out data.
func heldOut(field string) bool { return field == evalField || field == evalDataField }

// evalRows returns the number of rows of an evaluation batch.
func (c *resolved) evalRows() int64 {
	if n := dealt(&c.Config).Rows; n > 0 {
		return int64(n)
	}
	return int64(c.Batch) * int64(c.DataRanks())
}

// wraps says whether EvalSteps batches would read some of the given rows again.
func (c *resolved) wraps(rows int64) bool { return int64(c.EvalSteps) > rows/c.evalRows() }

// sampling returns how the run samples the data of a field. Evaluation batches are as large as
// those of the largest step.
func (c *resolved) sampling(order data.Order, field string) data.SamplerConfig {
	s := data.SamplerConfig{Order: order, Seed: c.Seed, Seq: c.Seq, Batch: c.Batch, Ranks: c.DataRanks(), Vocab: c.Shape.Vocab, StepRows: dealt(&c.Config)}
	if heldOut(field) {
		s.Accum = c.EvalAccum()
		return s
	}
	for i, from := range c.BatchSchedule {
		of := c.At(from.Step)
		if i == 0 {
			s.StepRows = dealt(&of)
		} else {
			s.Later = append(s.Later, data.RowsFrom{Step: from.Step, StepRows: dealt(&of)})
		}
	}
	return s
}

// dealt returns how a step's rows are distributed over ranks and micro-batches.
func dealt(c *config.Config) data.StepRows {
	s := data.StepRows{Accum: c.Accum}
	if c.Reproducible && !c.Inference {
		s.Shares, s.Rows = c.Shares(), c.StepRows()
	}
	return s
}

func (b *batches) fill(step, micro, rank int, m *data.Micro) error {
	if b.samples != nil {
		return b.samples.FillSamples(step, micro, rank, m)
	}
	for _, in := range m.Inputs { // rows of files are one document
		clear(in)
	}
	return b.sampler.Fill(step, micro, rank, m.Tokens, m.Targets)
}

// Fingerprint identifies the data.
func (b *batches) Fingerprint() (data.Fingerprint, error) {
	if b.chat != nil {
		return b.chat.Fingerprint(), nil
	}
	if b.samples != nil {
		return b.samples.Fingerprint()
	}
	return data.FingerprintOf(b.source)
}

// Sampler returns the sampler, which chooses the samples of each micro-batch.
func (b *batches) Sampler() *data.Sampler { return b.sampler }

// OwnSamples tells whether the program provides the samples.
func (b *batches) OwnSamples() bool { return b.samples != nil }

// countTargets returns the counted targets of a step's global batch.
func (b *batches) countTargets(step int) (sum data.Counted, err error) {
	if b.samples != nil {
		return b.samples.CountTargets(step)
	}
	if b.all {
		return b.sampler.CountTargets(step), nil
	}
	err = b.sampler.EachMicro(step, func(micro, rank int) error {
		if err := b.sampler.Fill(step, micro, rank, b.scratch[0], b.scratch[1]); err != nil {
			return err
		}
		n := int64(0)
		for _, v := range b.scratch[1] {
			if v >= 0 {
				n++
			}
		}
		sum.Add(n)
		return nil
	})
	return sum, err
}

func (b *batches) close() error {
	if b.chat != nil {
		return b.chat.Close()
	}
	if b.buffer == nil {
		return nil
	}
	return b.buffer.Close()
}

// Sample returns the tokens and targets of a micro-batch of the training data, by step and
// micro-batch from 0.
func (t *Trainer) Sample(step, micro, rank int) (tokens, targets []int32, err error) {
	if t.train == nil {
		return nil, nil, cmp.Or(t.fatal, errNoTraining)
	}
	shape := planner.SampleShape(t.plan.Program, t.cfg.Batch)
	m := shape.NewMicro(t.cfg.Batch)
	return m.Tokens, m.Targets, t.train.fill(step, micro, rank, m)
}
