package train

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/comm/algo"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/release"
	"github.com/spillway-ml/spillway/receipt"
	"github.com/spillway-ml/spillway/train/saving"
)

// receipts makes the lines of a run's receipt. A nil *receipts makes none.
type receipts struct {
	log    *receipt.Log // nil: nothing is written
	rows   []byte       // hash of each row of the current step
	steps  []receipt.Step
	took   time.Duration
	synced time.Time // when a line was last synced
	failed bool      // the last line could not be written, and a warning was given
}

// refuseOldReceipt refuses a file that is not a receipt, or is the receipt of a run that this
// one does not resume.
func refuseOldReceipt(q *request) error {
	if q.Receipt == "" {
		return nil
	}
	holds, err := receipt.Holds(q.opener(), q.Receipt)
	if err != nil {
		return fmt.Errorf("Config.Receipt %.80q: %w; give another file", q.Receipt, err)
	}
	if holds && !q.Resume {
		return config.Refuse("Config.Receipt %.80q holds the receipt of another run; give Config.Resume to go on with that run, or another file", q.Receipt)
	}
	return nil
}

// followReceipt returns the path of the run's receipt: when it resumes, the one that the newest
// checkpoint names, unless Config.Receipt names another. note says which one is used.
func (q request) followReceipt() (path, note string, err error) {
	given := q.Receipt
	if !q.Resume || q.Checkpoint == "" || q.Inference {
		return given, "", nil
	}
	d, err := checkpoint.OpenDir(q.opener(), q.Checkpoint)
	var entries []checkpoint.Entry
	if err == nil {
		entries, err = d.Scan()
		err = errors.Join(err, d.Close())
	}
	if err != nil {
		return "", "", fmt.Errorf("Config.Checkpoint %s: %w", q.Checkpoint, err)
	}
	named, until, newest := "", 0, 0 // the last receipt, the last step in it, and the last step
	for _, e := range slices.Backward(entries) {
		var was saving.Record
		if e.Err != nil || json.Unmarshal(e.Manifest.Run, &was) != nil {
			continue
		}
		newest = max(newest, e.Step)
		if named, until = was.ReceiptPath(q.Checkpoint), e.Step; named != "" {
			break
		}
	}
	gap := ""
	if until < newest {
		gap = fmt.Sprintf(", steps %d to %d in none", until+1, newest)
	}
	switch {
	case named == "":
		return given, "", nil
	case given != "":
		if holds, err := receipt.Holds(q.opener(), given); err == nil && !holds {
			note = fmt.Sprintf("receipt: steps until %d are in %s%s, and those from here on in %s: "+
				"verify checks each by its own Config.Receipt", until, named, gap, given)
		}
		return given, note, nil
	case gap != "":
		q.Warnf("the run had a receipt until step %d, %.80q: steps from here on are in none; "+
			"give Config.Receipt, that file or a new one", until, named)
		return "", "", nil
	}
	if strings.EqualFold(q.Device, "cuda") {
		q.Warnf("the run has a receipt, %.80q, and on Config.Device cuda it can't go on: steps from here on are in none", named)
		return "", "", nil
	}
	if holds, err := receipt.Holds(q.opener(), named); err != nil || !holds {
		q.Warnf("the run's receipt %.80q is not there, and steps from here on are in none; give Config.Receipt, the file where it lies now or a new one", named)
		return "", "", nil
	}
	return named, fmt.Sprintf("receipt: going on in %s, as Config.Checkpoint says; Config.Receipt would name another file", named), nil
}

// openReceipt writes the line with which the run starts or resumes.
func (t *Trainer) openReceipt(context.Context) error {
	c := t.cfg
	if c.Receipt == "" {
		return nil
	}
	began := time.Now()
	about, err := t.describeRun()
	if err != nil {
		return fmt.Errorf("Config.Receipt: %w", err)
	}
	log, left, err := receipt.Continue(c.opener(), c.Receipt, t.at.Step)
	if err != nil {
		return fmt.Errorf("Config.Receipt: %w", err)
	}
	t.receipt = &receipts{log: log}
	if n := len(log.Cut); t.follows && n > 0 && slices.ContainsFunc(log.Cut[:n-1], func(l receipt.Line) bool { return l.Saved || l.Run != nil }) {
		return config.Refuse("Config.Receipt %.80q, which the checkpoint of step %d names, goes on behind it to step %d by way of other checkpoints: those may be a copy's; give this file to replace these steps, or another", c.Receipt, t.at.Step, left.Step)
	}
	about.Left = left
	line, err := t.receiptLine()
	if err != nil {
		return err
	}
	if err := t.sameStates(receipt.Hashed{Tensors: about.Tensors, Ranges: line.Ranges}); err != nil {
		return err
	}
	line.Run = about
	if err := log.Append(line, true); err != nil {
		return fmt.Errorf("Config.Receipt: %w", err)
	}
	t.at.Receipt = log.Head()
	t.receipt.took = time.Since(began)
	return nil
}

// sameStates refuses to resume with other states than the receipt's last line records.
func (t *Trainer) sameStates(now receipt.Hashed) error {
	log := t.receipt.log
	last := len(log.Lines) - 1
	if last < 0 || log.Lines[last].Step != t.at.Step {
		return nil
	}
	ranges, err := log.Ranges(last)
	if err != nil {
		return fmt.Errorf("Config.Receipt: %w", err)
	}
	if p := receipt.Differ(receipt.Hashed{Tensors: log.Run(last).Tensors, Ranges: ranges}, now); p != nil {
		return config.Refuse("Config.Receipt %.80q: after step %d it has another %s, than the checkpoint that the run goes on from; go on from another checkpoint, or give another file", t.cfg.Receipt, t.at.Step, p)
	}
	return nil
}

// receiptLine makes a line about the current states.
func (t *Trainer) receiptLine() (r receipt.Record, err error) {
	if err := t.flush(); err != nil {
		return r, err
	}
	tensors, err := t.ranks.Tensors()
	if err != nil {
		return r, err
	}
	r = receipt.Record{Step: t.at.Step, Sample: t.train.sampler.Tell(t.at.Step), Skipped: t.at.Skipped}
	if t.scales() {
		r.LossScale = &[2]float64{t.at.Scale.Scale, t.at.Scale.Clean}
	}
	if r.Ranges, err = t.ranks.Hash(); err == nil {
		r.Root = receipt.Root(tensors, r.Ranges)
	}
	return r, err
}

// record writes a line about the steps since the last line. saved says that a checkpoint of the
// same states follows. The lines of a checkpoint and of the end are synced at once; others at
// most once a second, since a resumed run repeats the steps after a checkpoint.
func (t *Trainer) record(saved, last bool) error {
	p := t.receipt
	if p == nil || p.log == nil || len(p.steps) == 0 {
		return nil
	}
	began := time.Now()
	defer func() { p.took += time.Since(began) }()
	line, err := t.receiptLine()
	if err != nil {
		return err
	}
	line.Steps, line.Saved = p.steps, saved
	sync := saved || last || began.Sub(p.synced) >= time.Second
	if err := p.log.Append(line, sync); err != nil {
		return fmt.Errorf("Config.Receipt: %w", err)
	}
	if sync {
		p.synced = began
	}
	t.at.Receipt = p.log.Head()
	p.steps, p.failed = nil, false
	return nil
}

// recordDue writes a line if one is due: before a checkpoint, every ReceiptEvery steps, and at
// the end. A failed write is an error only at the end: the next line covers the same steps.
func (t *Trainer) recordDue(saved, last bool) error {
	if t.receipt == nil || !saved && !last && t.at.Step%t.cfg.ReceiptSteps() != 0 {
		return nil
	}
	if !last {
		return t.recordOrWarn(saved)
	}
	err := t.record(saved, true)
	if err != nil && t.fatal == nil {
		err = t.record(saved, true)
	}
	return err
}

// recordOrWarn is record. Its failure is an error if the job has ended, and otherwise a
// warning.
func (t *Trainer) recordOrWarn(saved bool) error {
	err := t.record(saved, false)
	switch {
	case t.fatal != nil:
		return t.fatal
	case err == nil || t.receipt.failed:
	case endsTheJob(err):
		return fmt.Errorf("step %d: the receipt: %w", t.at.Step, err)
	default:
		t.receipt.failed = true
		t.cfg.Warnf("%v; training goes on, and the next line has these steps too", err)
	}
	return nil
}

// begin allocates the hashes for the rows of a step.
func (p *receipts) begin(s *data.Sampler, step int) {
	if p != nil {
		p.rows = make([]byte, (s.Tell(step+1)-s.Tell(step))*sha256.Size)
	}
}

// filled hashes the rows of a micro-batch. It may be called concurrently for different ones.
func (p *receipts) filled(s *data.Sampler, step, micro, rank int, m *data.Micro, rows int) {
	if p == nil {
		return
	}
	var b []byte
	for row := range rows {
		if s.IsPadding(step, micro, rank, row) {
			continue
		}
		b = appendInts(appendInts(b[:0], part(m.Tokens, row, rows)), part(m.Targets, row, rows))
		for _, in := range m.Inputs {
			for _, v := range part(in, row, rows) {
				b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
			}
		}
		sum := sha256.Sum256(b)
		copy(p.rows[(s.GlobalSample(step, micro, rank, row)-s.Tell(step))*sha256.Size:], sum[:])
	}
}

// part returns the elements of one of rows equal rows of all.
func part[T any](all []T, row, rows int) []T {
	n := len(all) / rows
	return all[row*n : (row+1)*n]
}

func appendInts(b []byte, v []int32) []byte {
	for _, x := range v {
		b = binary.LittleEndian.AppendUint32(b, uint32(x))
	}
	return b
}

// ended adds a finished step to the next line.
func (p *receipts) ended(r *StepResult, targets int64) {
	if p == nil {
		return
	}
	sum := sha256.Sum256(p.rows)
	p.steps = append(p.steps, receipt.Step{Data: hex.EncodeToString(sum[:]), Targets: targets, LR: r.LR, Loss: receipt.Bits32(r.Loss), GradNorm: receipt.Bits64(r.GradNorm), Skipped: r.Skipped})
}

func (p *receipts) close() error {
	if p == nil || p.log == nil {
		return nil
	}
	log := p.log
	p.log = nil
	if err := log.Close(); err != nil {
		return fmt.Errorf("Config.Receipt: %w", err)
	}
	return nil
}

// ReceiptWritten summarizes what a run has written of its receipt.
type ReceiptWritten struct {
	Lines   int
	Head    string  // SHA-256 of the last line, which chains all lines before it
	Seconds float64 // time spent on hashing and writing
}

// Receipt returns what was written of the receipt; nil without Config.Receipt.
func (t *Trainer) Receipt() *ReceiptWritten {
	if t.receipt == nil || t.receipt.log == nil {
		return nil
	}
	return &ReceiptWritten{len(t.receipt.log.Lines), t.receipt.log.Head(), t.receipt.took.Seconds()}
}

// describeRun returns everything that the results of the following steps depend on.
func (t *Trainer) describeRun() (*receipt.Run, error) {
	c := t.cfg
	about := &receipt.Run{Format: receipt.Format, Spillway: release.Text(), Every: c.ReceiptSteps(), Epochs: t.train.sampler.EpochsVersion(),
		Arithmetic: saving.Arithmetic(&c.Config, t.platform.GPU())}
	about.Own = ownNames(&c.Config)
	print, err := t.train.Fingerprint()
	if err != nil {
		return nil, err
	}
	about.Data = receipt.Data{Tokens: print.Tokens, SHA256: print.SHA256}
	if about.Tensors, err = t.ranks.Tensors(); err != nil {
		return nil, err
	}
	if c.Own.Model == nil {
		text, err := json.Marshal(c.Shape)
		if err == nil {
			err = json.Unmarshal(text, &about.Model)
		}
		if err != nil {
			return nil, err
		}
	}
	p, err := c.Logical()
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256([]byte(graph.Format(p)))
	about.Program = hex.EncodeToString(sum[:])
	about.Config, err = resultFields(&c.Config)
	return about, err
}

// ownNames lists, for a receipt, the values that the program itself provides.
func ownNames(c *config.Config) (list []string) {
	model, rule := c.Own.Names()
	for _, own := range []struct{ what, name string }{{"model", model}, {"rule", rule}} {
		if own.name != "" {
			list = append(list, own.what+" "+own.name)
		}
	}
	if c.Own.Data != nil {
		list = append(list, "data")
	}
	if c.Own.Schedule != nil {
		list = append(list, "schedule")
	}
	return list
}

// notResults are the fields of Config that do not affect the results of steps. They say where
// and how a run computes, which data it only evaluates on, and what it writes.
var notResults = strings.Fields(`Own Chat Receipts Epochs Threads Prefetch Inference EvalData EvalGlob EvalEvery EvalSteps Device DeviceMemory HostMemory
	Disk DiskMemory DiskTuning DiskCache FrozenCache RequirePinned CUDAGraphs Planned Warn Outside LocalRanks Target PerHost Recompute Offload
	Checkpoint CheckpointMark SaveEvery AsyncSave Keep Resume AcceptChanges Timeout Metrics Receipt ReceiptEvery Trace TensorBoard
	MetricsAddr Measure PeakFlops Generate Allow`)

// isResult tells whether results depend on a field of Config, so that a receipt records it.
func isResult(f reflect.StructField) bool {
	return f.IsExported() && !slices.Contains(notResults, f.Name)
}

// resultFields returns the fields of Config on which results depend. Ranks and related fields
// are left out if they change nothing: with Reproducible only a step's rows matter. The ZeRO
// stage is left out if all stages give the same bits; otherwise it is the lowest stage that
// gives them.
func resultFields(c *config.Config) (map[string]json.RawMessage, error) {
	d := *c
	leave := map[string]bool{}
	if d.Algorithm() != algo.Ring {
		leave["Collectives"] = true
	}
	if n := d.Slices(); n == 0 {
		leave["Tensor"], leave["TensorSlices"] = true, true
	} else if d.TensorSlices = n; strings.EqualFold(d.PrecisionName(), "fp32") {
		d.Ranks, leave["Tensor"] = d.DataRanks(), true // any number of ranks gives the bits of the slices
	}
	switch {
	case d.Reproducible:
		d.GlobalBatch = c.StepRows()
		leave["Accum"], leave["RankShares"], leave["Zero"] = true, true, true
		if leave["Ranks"] = leave["Tensor"]; !leave["Tensor"] {
			d.Ranks = d.Tensor // one group, by which any number of ranks is known
		}
	case d.ShardSize > 0:
	case d.Accum == 1 || d.InLayers():
		leave["Zero"] = true
	default:
		d.Zero = d.Zero / 2 * 2
	}
	fields := map[string]json.RawMessage{}
	v := reflect.ValueOf(&d).Elem()
	for _, f := range reflect.VisibleFields(v.Type()) {
		if !isResult(f) || leave[f.Name] {
			continue
		}
		text, err := json.Marshal(v.FieldByIndex(f.Index).Interface())
		if err != nil {
			return nil, fmt.Errorf("the receipt of Config.%s: %w", f.Name, err)
		}
		fields[f.Name] = text
	}
	return fields, nil
}
