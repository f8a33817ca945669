package train

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/release"
	"github.com/spillway-ml/spillway/receipt"
	"github.com/spillway-ml/spillway/train/receipts"
	"github.com/spillway-ml/spillway/train/saving"
)

// openReceipt writes the line with which the run starts or resumes.
func (t *Trainer) openReceipt(context.Context) (err error) {
	c := t.cfg
	if c.Receipt == "" {
		return nil
	}
	t.receipt, t.at.Receipt, err = receipts.Open(&c.Config, c.opener(), t.at.Step, t.follows, t.describeRun, t.receiptLine)
	if err == nil {
		t.receipt.Async = t.saver != nil && t.saver.Aside()
	}
	return err
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
	r = receipt.Record{Step: t.at.Step, Sample: t.train.sampler.Tell(t.at.Step), Skipped: t.at.Skipped, Unsaved: t.at.Unsaved}
	if t.scales() {
		r.LossScale = &[2]float64{t.at.Scale.Scale, t.at.Scale.Clean}
	}
	if r.Ranges, err = t.ranks.Hash(); err == nil {
		r.Root = receipt.Root(tensors, r.Ranges)
	}
	return r, err
}

// record writes a line about the steps since the last line, see receipts.Lines.Write.
func (t *Trainer) record(saved, last bool) error {
	head, err := t.receipt.Write(saved, last, t.receiptLine)
	if head != "" {
		t.at.Receipt, t.at.Unsaved = head, nil
	}
	return err
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
	case err == nil || t.receipt.Failed:
	case endsTheJob(err):
		return fmt.Errorf("step %d: the receipt: %w", t.at.Step, err)
	default:
		t.receipt.Failed = true
		t.cfg.Warnf("%v; training goes on, and the next line has these steps too", err)
	}
	return nil
}

// Receipt summarizes the written receipt; nil without Config.Receipt.
func (t *Trainer) Receipt() *receipts.Written { return t.receipt.Written() }

// describeRun returns everything that the results of the following steps depend on.
func (t *Trainer) describeRun() (*receipt.Run, error) {
	c := t.cfg
	about := &receipt.Run{Format: receipt.Format, Spillway: release.Text(), Every: c.ReceiptSteps(), Epochs: t.train.sampler.EpochsVersion(),
		Arithmetic: saving.Arithmetic(&c.Config, t.platform.GPU())}
	about.Own = receipts.OwnNames(&c.Config)
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
	about.Program = graph.Hash(p)
	about.Config, err = receipts.Fields(&c.Config)
	return about, err
}
