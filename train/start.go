package train

import (
	"cmp"
	"context"
	"errors"
	"io"
	"strings"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/train/job"
	"github.com/spillway-ml/spillway/train/receipts"
	"github.com/spillway-ml/spillway/train/saving"
)

// New plans the run and refuses it if it does not fit. Only then does it allocate memory, start the
// ranks and set the parameters' initial values: drawn, from Init, or from the checkpoint to resume
// from.
func New(ctx context.Context, cfg config.Config) (*Trainer, error) {
	return request{Config: cfg}.start(ctx)
}

// NewIn is New with another opener for the checkpoint folder than the system's. It is for tests.
func NewIn(ctx context.Context, cfg config.Config, folders filesys.Opener) (*Trainer, error) {
	return request{Config: cfg, hooks: hooks{folders: folders}}.start(ctx)
}

// NewFrom is New for a run whose Config.Model and Config.Init are the open model m.
func NewFrom(ctx context.Context, cfg config.Config, m *planner.Model) (*Trainer, error) {
	cfg.Model, cfg.Init = m.Path, m.Path
	return request{Config: cfg, hooks: hooks{opened: m}}.start(ctx)
}

func (q request) start(ctx context.Context) (*Trainer, error) {
	if err := cmp.Or(ctx.Err(), level.Err(), q.Runnable(), planner.Runnable(&q.Config), q.Validate()); err != nil {
		return nil, err
	}
	if q.Checkpoint == "" && strings.EqualFold(q.AsyncSave, config.AsyncOn) { // only a plan may have it without a folder, to show the memory it needs
		return nil, config.Refuse("Config.AsyncSave on needs Config.Checkpoint: the folder to save to")
	}
	path, note, err := receipts.Follow(&q.Config, q.opener())
	follows := path != q.Receipt
	q.Receipt = path
	if err := cmp.Or(err, refuseOverwriting(&q), saving.Look(&q.Config, q.opener())); err != nil {
		return nil, err
	}
	t := &Trainer{job: job.Of(&q.Config), follows: follows}
	if note != "" {
		t.notes = append(t.notes, note)
	}
	if t.platform, q.Config, err = newPlatform(q); err != nil {
		return nil, err
	}
	if t.job != nil { // once ctx is canceled, do not wait for a process that does not answer
		stay := context.AfterFunc(ctx, func() { t.job.Broken(ctx.Err()) })
		defer stay()
	}
	if q.Config, err = job.Greet(q.Config); err != nil {
		return nil, t.refused(err)
	}
	fit := func(ctx context.Context) error { return t.fit(ctx, q) }
	for _, begin := range []func(context.Context) error{fit, t.openData, t.openOutputs, t.openAll, t.initialize, t.openReceipt} {
		err := ctx.Err()
		if err == nil {
			err = begin(ctx)
		}
		if err != nil {
			return nil, t.refused(err)
		}
	}
	t.notes = append(t.notes, t.lengthNotes()...)
	t.accepted = true
	return t, nil
}

// refused ends a run that has not begun, because of err. It tells the processes that have no task
// yet: a silent EOF would look like a crashed leader, and would hide the leader's own error.
func (t *Trainer) refused(err error) error {
	if t.job != nil {
		t.job.Dismiss(err)
	}
	return errors.Join(err, t.Close())
}

// fit resolves and plans the run and refuses a plan that does not fit. Some devices know the memory
// they need outside the arenas only once there is a plan. If the plan has no room for that, fit
// plans again.
func (t *Trainer) fit(ctx context.Context, q request) error {
	for {
		if err := t.fitOnce(ctx, q); err != nil {
			return err
		}
		if err := t.platform.Measure(t.plan); err != nil {
			return err
		}
		before, after := q.Outside[graph.Device], t.platform.Limits().Outside[graph.Device]
		limit, use := t.plan.Config.Capacity[graph.Device], t.plan.Layout.Spaces[graph.Device].Peak+t.plan.Config.Outside[graph.Device]
		if after <= before || limit == 0 || use+after-before <= limit {
			t.cfg = t.cfg.beside(after)
			t.plan.Config.Outside[graph.Device] += after - before
			break
		}
		q.Outside = t.platform.Limits().Outside // each round leaves more memory outside the arenas
	}
	if !q.Inference {
		t.notes = append(t.notes, t.adapterNotes()...)
		t.notes = append(t.notes, fileNotes(&t.cfg.Config)...)
		t.notes = append(t.notes, planner.DropoutNote(t.cfg.Shape.Dropouts, &t.cfg.Config)...)
		t.notes = append(t.notes, config.RingNote(&t.cfg.Config)...)
		t.notes = append(t.notes, t.cfg.RateNote()...)
	}
	if t.cfg.Planned != nil {
		t.cfg.Planned(t.plan)
	}
	return nil
}

// fitOnce plans the run once, with the limits of the device that are known so far.
func (t *Trainer) fitOnce(ctx context.Context, q request) (err error) {
	if t.plan, t.cfg, err = q.build(ctx); err != nil {
		return err
	}
	t.ports = t.plan.Program.Ports()
	t.inputs, t.floats = nil, nil
	for k := range microsOfPhase(t.plan.Program) {
		t.inputs = append(t.inputs, t.plan.Program.PortsOf(k))
		t.floats = append(t.floats, t.plan.Program.InputsOf(k))
	}
	hw := hardwareOf(t.platform, &t.cfg.Config)
	if err := t.cfg.Fits(ctx, t.plan, hw); err != nil {
		return t.platform.Refused(t.leastDisk(err))
	}
	return onThisMachine(ctx, t.cfg.Resolved, t.plan, t.platform.InMachine(), hw)
}

// openAll opens the resources of the run: the disk tier, the caches, the other processes, threads
// and ranks.
func (t *Trainer) openAll(ctx context.Context) error {
	cfg := t.cfg
	// Checks that only this process makes come first: until the others have a task, they can still
	// be dismissed.
	if err := t.openDisk(); err != nil {
		return err
	}
	if err := t.openPrefixCache(); err != nil {
		return err
	}
	if err := t.lead(); err != nil {
		return err
	}
	t.pool = pool.New(cfg.ComputeThreads())
	if err := t.platform.Start(t.setup()); err != nil {
		return err
	}
	if err := t.openRanks(); err != nil {
		return err
	}
	shape := planner.SampleShape(t.plan.Program, cfg.Batch)
	shape.Inputs = nil // float inputs are written to their ports
	for range t.ranks.Len() {
		t.micro = append(t.micro, shape.NewMicro(cfg.Batch))
		t.read = append(t.read, 0)
	}
	t.states = t.ranks.States()
	if t.saver == nil {
		return nil
	}
	if t.plan.Layout.Spaces[graph.Disk].Peak > 0 {
		if err := t.saver.CheckRoom(ctx); err != nil {
			return err
		}
	}
	return t.saver.Over(t.ranks, t.states)
}

// errClosed is the error of calls after Close.
var errClosed = errors.New("the Trainer is closed")

// errNoTraining is the error of calls for training data in a run without training.
var errNoTraining = errors.New("the run has no training data: Config.Inference trains nothing")

// Close ends the ranks, frees their memory and writes the trace. Later calls that need them return
// an error.
func (t *Trainer) Close() error {
	defer func() { t.fatal = cmp.Or(t.fatal, errClosed) }()
	var errs []error
	t.settled() // the save reads memory of the ranks' processes
	if t.ranks != nil {
		if t.fatal == nil {
			t.writeTrace(t.ranks.Traces())
		}
		errs = append(errs, t.ranks.Close())
		t.ranks = nil
	}
	if t.job != nil {
		errs = append(errs, t.job.HangUp())
	}
	if t.platform != nil {
		errs = append(errs, t.platform.Close())
		t.platform = nil
	}
	if t.prefix != nil {
		errs = append(errs, t.prefix.close())
		t.prefix = nil
	}
	errs = append(errs, t.closeDisk())
	if t.pool != nil {
		t.pool.Close()
		t.pool = nil
	}
	t.writeTrace(nil)
	for _, b := range []*batches{t.train, t.eval} {
		if b != nil {
			errs = append(errs, b.close())
		}
	}
	t.train, t.eval = nil, nil
	if t.saver != nil {
		t.saver.Close()
		t.saver = nil
	}
	errs = append(errs, t.receipt.Close())
	return errors.Join(errs...)
}

// writeTrace writes the trace of a run that has begun, unless it is written already. others are the
// events of other processes' ranks; after a failed job there are none.
func (t *Trainer) writeTrace(others []exec.Events) {
	trace := t.trace
	if trace == nil {
		return
	}
	t.trace = nil
	if !t.accepted {
		return
	}
	if t.job != nil && others == nil {
		t.cfg.Warnf("Config.Trace shows %s alone: the job has failed, and the other ranks' processes keep theirs", platform.Names(job.World(&t.cfg.Config).Local))
	}
	if err := writeAside(t.cfg.Trace, func(w io.Writer) error { return trace.Write(w, others...) }); err != nil {
		t.cfg.Warnf("Config.Trace: %v", err)
	}
}
