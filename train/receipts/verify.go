package receipts

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/receipt"
	"github.com/spillway-ml/spillway/run"
	"github.com/spillway-ml/spillway/train/saving"
)

// Verification checks a receipt: it runs steps again and compares them.
type Verification struct {
	// Checkpoint is the run's folder of checkpoints; "": none.
	Checkpoint string
	// Receipt is the file; "": the one that the newest checkpoint names.
	Receipt string
	// Choose selects from the segments that can be run again; nil: all.
	Choose func(can []Segment) []Segment
	// Change completes the Config of the steps that are run again: placement, paths, and values
	// that the program provides. The fields that decide bits are the receipt's.
	Change func(*config.Config)
	// Tell is called for each segment; nil: not called.
	Tell func(Segment)
}

// Segment is the steps from one checkpoint of a run to the next one.
type Segment struct {
	From, To int // steps done before and after it; equal: a checkpoint alone
	// Start is the name of its first checkpoint; "": the values that the run began with.
	Start string
	// Missing says why the segment can't be run again; "": it can.
	Missing string
	Chosen  bool
	Found   *receipt.Difference // nil: equal, or not chosen

	first, last int // lines
}

// Steps returns the segment's number of steps.
func (s *Segment) Steps() int { return s.To - s.From }

// Verified is the result of VerifyReceipt.
type Verified struct {
	Receipt  string // its path
	Lines    int
	Head     string // see Written
	From, To int    // steps before the first line and after the last
	Steps    int    // of the run, as far as its checkpoints and the receipt show
	Cut      string // why the last line was left out; "": it was not
	Spillway string // the version that wrote the newest start or resume
	Segments []Segment
	Checked  int // steps that were run again and are equal
}

// Again is a run that runs segments again; it writes nothing.
type Again interface {
	Config() config.Config
	// Describe returns everything that the results of its steps depend on.
	Describe() (*receipt.Run, error)
	// UseEpochs shuffles epochs as the given version did, see data.Epochs.
	UseEpochs(version int) error
	// Replay loads the states of a checkpoint, and returns the checkpoint's record.
	Replay(ctx context.Context, dir checkpoint.Dir, name string) (saving.Record, error)
	// Step runs a step. Its error is a run.ErrDiverged if values are not finite.
	Step(ctx context.Context) (receipt.Step, error)
	Done() int // steps
	// States returns the tensors and a line about the current states.
	States() ([]receipt.Tensor, receipt.Record, error)
	Close() error
}

// verifying is a running Verification.
type verifying struct {
	*Verification
	begin   func(context.Context, config.Config) (Again, error)
	chain   *receipt.Chain
	dir     checkpoint.Dir
	saved   map[int]string // names of the run's checkpoints by step
	records map[int]saving.Record
	all     []Segment
	// diverged says that the newest step diverged. The run can then run nothing else.
	diverged bool
}

// Verify follows the chain of a receipt, and runs chosen segments again, in runs that begin starts.
// The error is receipt.ErrDiffers if something differs from the record; the findings are returned
// with it.
func Verify(ctx context.Context, v Verification, begin func(context.Context, config.Config) (Again, error)) (result *Verified, err error) {
	w := &verifying{Verification: &v, begin: begin, saved: map[int]string{}, records: map[int]saving.Record{}}
	if err := w.open(); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, w.chain.Close(), w.dir.Close()) }()
	lines := w.chain.Lines
	result = &Verified{Receipt: w.Receipt, Lines: len(lines), Head: w.chain.Head()}
	var broken *receipt.Broken
	switch {
	case errors.As(w.chain.Torn, &broken):
		return result, broken
	case len(lines) == 0:
		return result, fmt.Errorf("receipt %.80q is empty", w.Receipt)
	case w.chain.Torn != nil:
		result.Cut = w.chain.Torn.Error()
	}
	result.From, result.To = lines[0].Step, lines[len(lines)-1].Step
	result.Spillway = w.chain.Run(len(lines) - 1).Spillway
	w.segments()
	result.Steps = w.all[len(w.all)-1].To
	err = w.run(ctx)
	result.Segments = w.all
	for i := range w.all {
		s := &w.all[i]
		if s.Chosen && s.Found == nil && err == nil {
			result.Checked += s.Steps()
		}
	}
	if err == nil {
		err = w.outcome(result)
	}
	return result, err
}

// outcome returns an error for the first difference, for lines that are missing according to a
// checkpoint, or if no segment was run.
func (w *verifying) outcome(r *Verified) error {
	chosen := 0
	for i := range w.all {
		s := &w.all[i]
		if s.Found != nil {
			return fmt.Errorf("%w: %s", receipt.ErrDiffers, s.Found)
		}
		if s.Chosen {
			chosen++
		}
	}
	for _, step := range slices.Sorted(maps.Keys(w.saved)) {
		was, name := w.records[step], w.saved[step]
		switch {
		case step <= r.From || !w.inThis(was):
		case step > r.To:
			return fmt.Errorf("%w: it ends after step %d, and there is %s: its last lines are missing", receipt.ErrDiffers, r.To, name)
		case was.ReceiptHead != "" && !w.chain.Has(was.ReceiptHead):
			return fmt.Errorf("%w: %s was saved behind a line of SHA-256 %.16s…, which is not in it: its lines were written anew", receipt.ErrDiffers, name, was.ReceiptHead)
		}
	}
	if chosen == 0 {
		return w.noneChosen()
	}
	return nil
}

// noneChosen returns an error that lists the segments that could have been chosen.
func (w *verifying) noneChosen() error {
	var can []string
	for i := range w.all {
		if s := &w.all[i]; s.Missing == "" && (s.Steps() > 0 || s.To == 0) {
			can = append(can, fmt.Sprintf("%d-%d", min(s.From+1, s.To), s.To))
		}
	}
	if len(can) == 0 {
		return fmt.Errorf("receipt %.80q: no segment was run again: none has its first checkpoint", w.Receipt)
	}
	if n := len(can); n > 8 {
		can = append(can[:7], fmt.Sprintf("…, %s", can[n-1]))
	}
	return fmt.Errorf("receipt %.80q: no segment was run again: none of those that can be was chosen; their steps are %s", w.Receipt, strings.Join(can, ", "))
}

// inThis tells whether the run that wrote a checkpoint used this receipt: the checkpoint names it,
// or a checkpoint that names the same receipt has the hash of one of its lines.
func (w *verifying) inThis(was saving.Record) bool {
	if was.Receipt == "" || filepath.Base(was.ReceiptPath("")) == filepath.Base(w.Receipt) {
		return was.Receipt != ""
	}
	for _, r := range w.records {
		if r.Receipt == was.Receipt && w.chain.Has(r.ReceiptHead) {
			return true
		}
	}
	return false
}

// open opens the receipt and the folder of checkpoints.
func (w *verifying) open() (err error) {
	given := w.Receipt
	if w.Checkpoint != "" {
		if w.dir, err = checkpoint.OpenDir(filesys.System, w.Checkpoint); err == nil {
			err = w.scan()
		}
		if err != nil {
			return fmt.Errorf("Config.Checkpoint %s: %w", w.Checkpoint, errors.Join(err, w.dir.Close()))
		}
	}
	named := w.Receipt != given
	if w.Receipt == "" {
		return config.RefuseField("Receipt", "no checkpoint in %.80q names a receipt; give Config.Receipt", w.Checkpoint)
	}
	if _, err = receipt.Holds(filesys.System, w.Receipt); err == nil {
		w.chain, err = receipt.Read(filesys.System, w.Receipt)
	}
	switch {
	case err == nil:
		return nil
	case named && errors.Is(err, fs.ErrNotExist):
		err = config.RefuseField("Receipt", "receipt %.80q, which the checkpoints of %.80q name: %w; give Config.Receipt, the file where it lies now", w.Receipt, w.Checkpoint, err)
	case !errors.Is(err, receipt.ErrDiffers):
		err = fmt.Errorf("receipt %.80q: %w", w.Receipt, err)
	}
	return errors.Join(err, w.dir.Close())
}

// scan finds the run's checkpoints.
func (w *verifying) scan() error {
	entries, err := w.dir.Scan()
	if err != nil {
		return err
	}
	if len(entries) == 0 {
		return fmt.Errorf("there is no checkpoint: %w", fs.ErrNotExist)
	}
	marks, err := w.dir.Marks()
	if err != nil {
		return err
	}
	found := ""
	for _, e := range entries {
		if marks.Left(e.Manifest) {
			continue
		}
		w.saved[e.Step] = e.Name // of several checkpoints of a step, the last
		var was saving.Record
		if e.Err != nil || json.Unmarshal(e.Manifest.Run, &was) != nil {
			continue
		}
		w.records[e.Step] = was
		if was.Receipt != "" {
			found = was.ReceiptPath(w.Checkpoint)
		}
	}
	if w.Receipt == "" {
		w.Receipt = found
	}
	return nil
}

// segments divides the chain at checkpoints and at resumes.
func (w *verifying) segments() {
	lines := w.chain.Lines
	saved := receipt.Saved(lines)
	add := func(first, last int) {
		s := Segment{From: lines[first].Step, To: lines[last].Step, first: first, last: last, Start: w.saved[lines[first].Step]}
		initial := s.From == 0 && lines[first].Run != nil
		switch {
		case initial:
			s.Start = ""
		case s.Start == "" && w.Checkpoint == "":
			s.Missing = fmt.Sprintf("it starts from the checkpoint of step %d; give the folder of checkpoints, with Config.Receipt", s.From)
		case s.Start == "":
			s.Missing = fmt.Sprintf("the checkpoint of step %d is not there any more", s.From)
		}
		w.all = append(w.all, s)
	}
	// beside adds segments for steps of the run that this receipt does not have.
	beside := func(from, to, line int) {
		for from < to {
			until, why := w.elsewhere(from, to)
			w.all = append(w.all, Segment{From: from, To: until, first: line, last: line, Missing: why})
			from = until
		}
	}
	beside(0, lines[0].Step, 0)
	first := 0
	for i := 1; i < len(lines); i++ {
		if lines[i].Run != nil { // the previous segment has ended at its last line
			first = i
			beside(lines[i-1].Step, lines[i].Step, i-1)
			continue
		}
		ends := i+1 == len(lines) || lines[i+1].Run != nil
		if ends || saved[lines[i].Step] || w.saved[lines[i].Step] != "" {
			add(first, i)
			first = i
		}
	}
	last := len(lines) - 1
	if w.saved[lines[last].Step] != "" || lines[last].Step == 0 { // the run's initial values need no checkpoint
		add(last, last)
	}
	if len(w.saved) > 0 {
		beside(lines[last].Step, slices.Max(slices.Collect(maps.Keys(w.saved))), last)
	}
}

// elsewhere says why steps are not in this receipt, and up to which step the reason applies.
func (w *verifying) elsewhere(from, to int) (until int, why string) {
	none := "the run had no receipt then"
	if from == 0 {
		none = "this receipt begins after them"
	}
	until, why = from, none
	for _, step := range slices.Sorted(maps.Keys(w.records)) {
		if step <= from || step > to {
			continue
		}
		was, says := w.records[step], none
		if path := was.ReceiptPath(w.Checkpoint); path != "" && !w.inThis(was) {
			says = fmt.Sprintf("they are in the receipt %.80q; give it by Config.Receipt", path)
		}
		if until > from && says != why {
			return until, why
		}
		until, why = step, says
	}
	return to, why
}

// run runs the chosen segments, with one run for each start or resume.
func (w *verifying) run(ctx context.Context) error {
	var can []Segment
	for _, s := range w.all {
		if s.Missing == "" {
			can = append(can, s)
		}
	}
	if w.Choose != nil {
		can = w.Choose(can)
	}
	for i := range w.all {
		s := &w.all[i]
		s.Chosen = s.Missing == "" && slices.ContainsFunc(can, func(c Segment) bool { return c.first == s.first && c.last == s.last })
	}
	for i := 0; i < len(w.all); {
		about := w.chain.Run(w.all[i].first)
		n := i
		for n < len(w.all) && w.chain.Run(w.all[n].first) == about {
			n++
		}
		if err := w.runAll(ctx, about, w.all[i:n]); err != nil {
			return err
		}
		i = n
	}
	return nil
}

// runAll runs the chosen segments of one start or resume.
func (w *verifying) runAll(ctx context.Context, about *receipt.Run, of []Segment) error {
	tell := func(s Segment) {
		if w.Tell != nil {
			w.Tell(s)
		}
	}
	var t Again
	defer func() {
		if t != nil {
			_ = t.Close() // nothing was written
		}
	}()
	for i := range of {
		s := &of[i]
		if !s.Chosen {
			tell(*s)
			continue
		}
		if t == nil {
			var err error
			if t, err = w.start(ctx, about, s.From+1, s.Start == ""); err != nil {
				return err
			}
		}
		if err := w.again(ctx, t, s); err != nil {
			return err
		}
		if w.diverged { // the next segment needs another run
			_ = t.Close()
			t, w.diverged = nil, false
		}
		tell(*s)
	}
	return nil
}

// start creates the run that runs segments again. It checks that everything that the results depend
// on is as recorded; otherwise the segments can't be run again here.
func (w *verifying) start(ctx context.Context, about *receipt.Run, from int, initial bool) (t Again, err error) {
	c, err := configOf(about)
	if err != nil {
		return nil, fmt.Errorf("receipt %.80q: %w", w.Receipt, err)
	}
	if w.Change != nil {
		was := c
		w.Change(&c)
		if err := refuseOtherBits(&was, &c); err != nil {
			return nil, err
		}
	}
	if own := OwnNames(&c); !slices.Equal(own, about.Own) {
		return nil, config.RefuseField("Own", "receipt %.80q is of a run with values of a program (%s); verify it from that program, by VerifyReceipt", w.Receipt, strings.Join(about.Own, ", "))
	}
	if !initial {
		c.Init = "random" // the checkpoint has all states
	}
	rounding, portable := c.BF16Rounding, c
	portable.BF16Rounding = "portable"
	if saving.Arithmetic(&c, nil) != about.Arithmetic && saving.Arithmetic(&portable, nil) == about.Arithmetic {
		c = portable // the recorded rounding rule is the portable one
	}
	if t, err = w.begin(ctx, c); err != nil {
		return nil, fmt.Errorf("receipt %.80q: steps from %d on can't be run again here, with the run's settings and paths where none are given: %w", w.Receipt, from, err)
	}
	now, err := t.Describe()
	if err != nil {
		return t, err
	}
	if rounding != c.BF16Rounding {
		now.Config["BF16Rounding"] = about.Config["BF16Rounding"]
	}
	if field, got, want := now.FieldsDiffer(about); field != "" {
		return t, config.RefuseField(field, "receipt %.80q can't be verified here: Config.%s comes to %.80s, and the run had %.80s", w.Receipt, field, got, want)
	}
	if err := t.UseEpochs(about.Epochs); err != nil {
		return t, fmt.Errorf("receipt %.80q can't be verified here: %w", w.Receipt, err)
	}
	now.Epochs = about.Epochs
	if d := now.SameStart(about); d != nil {
		field, remedy := "", fmt.Sprintf("verify it with the version that wrote it, %.80s", about.Spillway)
		switch d.What {
		case "data":
			field, remedy = "Data", "give Config.Data, where the run's data lie now"
		case "model", "tensors":
			field, remedy = "Model", "give Config.Model, where the run's model lies now"
		case "arithmetic":
			remedy = "verify it on a processor that rounds so"
		}
		how := ""
		if field != "Model" { // values of Model are long, and begin alike
			how = fmt.Sprintf(", %.80q, and not %.80q", d.Recorded, d.Here)
		}
		return t, config.RefuseField(field, "receipt %.80q can't be verified here: its run had other %s%s; %s", w.Receipt, d.What, how, remedy)
	}
	return t, nil
}

// again runs a segment and records its first difference.
func (w *verifying) again(ctx context.Context, t Again, s *Segment) error {
	if s.Start != "" {
		was, err := t.Replay(ctx, w.dir, s.Start)
		switch {
		case err == nil && w.chain.Lines[s.first].Run == nil: // the same start or resume wrote the checkpoint
			if what := otherSettings(t.Config(), was); what != "" {
				s.Found = &receipt.Difference{Step: s.From, What: fmt.Sprintf("%s was written with other settings: %s", s.Start, what)}
				return nil
			}
		case errors.Is(err, checkpoint.ErrDamaged):
			s.Found = &receipt.Difference{Step: s.From, What: err.Error()}
			return nil
		case errors.Is(err, fs.ErrNotExist):
			s.Chosen, s.Missing = false, s.Start+" was removed meanwhile"
			return nil
		case err != nil:
			return err
		}
	}
	if err := w.compare(t, s, s.first); err != nil || s.Found != nil {
		return err
	}
	for n := s.first + 1; n <= s.last; n++ {
		what, err := w.steps(ctx, t, &w.chain.Lines[n])
		if err != nil {
			return err
		}
		s.Found = what
		if err := w.compare(t, s, n); err != nil || s.Found != nil {
			return err
		}
	}
	return nil
}

// steps runs all steps of a line, as far as possible, and returns the first difference.
func (w *verifying) steps(ctx context.Context, t Again, line *receipt.Line) (found *receipt.Difference, err error) {
	for i := range line.Steps {
		now, err := t.Step(ctx)
		step := line.Step - len(line.Steps) + i + 1
		switch {
		case errors.Is(err, run.ErrDiverged):
			w.diverged = true
			return &receipt.Difference{Step: step, What: err.Error()}, nil
		case err != nil:
			return nil, err
		}
		if what := now.Differs(&line.Steps[i]); what != "" && found == nil {
			found = &receipt.Difference{Step: step, What: what}
		}
	}
	return found, nil
}

// compare compares the current states with a line.
func (w *verifying) compare(t Again, s *Segment, n int) error {
	line := &w.chain.Lines[n]
	if t.Done() != line.Step {
		return nil // the steps ended earlier
	}
	tensors, now, err := t.States()
	if err != nil {
		return err
	}
	ranges, err := w.chain.Ranges(n)
	if err != nil {
		return err
	}
	what := ""
	switch {
	case now.Sample != line.Sample:
		what = fmt.Sprintf("%d samples seen, recorded %d", now.Sample, line.Sample)
	case now.Skipped != line.Skipped:
		what = fmt.Sprintf("%d updates skipped, recorded %d", now.Skipped, line.Skipped)
	case !reflect.DeepEqual(now.LossScale, line.LossScale):
		what = "the loss scale differs"
	}
	place := receipt.Differ(receipt.Hashed{Tensors: tensors, Ranges: now.Ranges}, receipt.Hashed{Tensors: w.chain.Run(n).Tensors, Ranges: ranges})
	if place == nil && what == "" {
		return nil
	}
	if s.Found == nil {
		s.Found = &receipt.Difference{Step: line.Step, What: what}
	}
	s.Found.State, s.Found.After = place, line.Step
	return nil
}

// otherSettings describes the first setting of a checkpoint that differs from the receipt's, apart
// from ranks and paths; "" if none differs.
func otherSettings(c config.Config, was saving.Record) string {
	names, lines := saving.Changed(was.Settings, saving.Settings(&c))
	for i, name := range names {
		switch name {
		case "ranks", "tensor", "pipeline", "accum", "accum-order", "global-batch", "collectives", "tokenizer", "order", "bf16-rounding":
			continue // if they decide bits, the receipt's Config is compared for them
		}
		return lines[i]
	}
	return ""
}
