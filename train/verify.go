package train

import (
	"context"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/receipt"
	"github.com/spillway-ml/spillway/train/receipts"
	"github.com/spillway-ml/spillway/train/saving"
)

// VerifyReceipt follows the chain of a receipt, and runs chosen segments again. The error is
// receipt.ErrDiffers if something differs from the record; the findings are returned with it.
func VerifyReceipt(ctx context.Context, v receipts.Verification) (*receipts.Verified, error) {
	return receipts.Verify(ctx, v, func(ctx context.Context, c config.Config) (receipts.Again, error) {
		t, err := New(ctx, c)
		if err != nil {
			return nil, err
		}
		t.receipt = &receipts.Lines{}
		return again{t}, nil
	})
}

// again implements receipts.Again by a Trainer.
type again struct{ *Trainer }

func (t again) Describe() (*receipt.Run, error) { return t.describeRun() }

func (t again) UseEpochs(version int) error { return t.train.sampler.UseEpochs(version) }

func (t again) Step(ctx context.Context) (receipt.Step, error) {
	t.receipt.Steps = nil
	if _, err := t.Trainer.Step(ctx); err != nil {
		return receipt.Step{}, err
	}
	return t.receipt.Steps[0], nil
}

func (t again) States() ([]receipt.Tensor, receipt.Record, error) {
	line, err := t.receiptLine()
	if err != nil {
		return nil, line, err
	}
	tensors, err := t.ranks.Tensors()
	return tensors, line, err
}

// Replay gives the run the states of a checkpoint of an open folder, and returns its record.
func (t again) Replay(ctx context.Context, dir checkpoint.Dir, name string) (was saving.Record, err error) {
	c, err := dir.Open(name)
	if err != nil {
		return was, err
	}
	defer c.Close() // it was only read
	if err := c.Whole(ctx); err != nil {
		return was, err
	}
	if err := t.zero(); err != nil {
		return was, err
	}
	was, err = saving.Replay(ctx, saving.Run{Config: t.cfg.Resolved, Plan: t.plan, Data: t.train, Progress: &t.at}, t.ranks, t.states, c)
	if err == nil {
		err = t.startScale(was.LossScale)
	}
	if err != nil {
		return was, err
	}
	t.inRow = 0
	return was, t.refresh()
}
