package train

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/run"
)

// Kinds of errors, for errors.Is. They stay the same when messages change.
var (
	// ErrConfig is the kind of errors about an invalid Config.
	ErrConfig = config.ErrRefused
	// ErrDoesNotFit is the kind of plans over a memory cap (plan.DoesNotFit), of searches that
	// find no plan within it, and of machines that are too small.
	ErrDoesNotFit = plan.ErrDoesNotFit
	// ErrNoDevice is the kind of errors about a device, or a library that it needs, that this
	// machine lacks.
	ErrNoDevice = platform.ErrNoDevice
	// ErrDiverged is the kind of runs whose loss, gradient norm or update is not finite.
	ErrDiverged = run.ErrDiverged
	// ErrDamaged is the kind of errors about a checkpoint that exists but is incomplete or
	// corrupt.
	ErrDamaged = checkpoint.ErrDamaged
	// ErrLost is the kind of errors about a job that lost one of its processes.
	ErrLost = comm.ErrLost
)

// Is puts the error among the kinds.
func (e *Diverged) Is(target error) bool { return target == ErrDiverged }

// Is puts the error among the kinds.
func (e *MachineTooSmall) Is(target error) bool { return target == ErrDoesNotFit }

// ErrStop ends the run in good order when the callback of Run returns it: with a checkpoint, if
// one is configured, and no error.
var ErrStop = errors.New("the run is to stop here")

// endsTheJob tells whether a save failed because a rank was lost: then no more steps are
// possible.
func endsTheJob(err error) bool {
	return slices.ContainsFunc([]error{comm.ErrLost, comm.ErrTimeout, comm.ErrMismatch, comm.ErrAborted}, func(kind error) bool { return errors.Is(err, kind) })
}

// Diverged is the error of a run that ended at a non-finite step. Nothing computed from that
// step is saved.
type Diverged struct {
	Step int // from 1
	// Loss and GradNorm of the step; GradNorm is 0 if the step ended before it was computed.
	Loss, GradNorm float64
	// Tensor is the first tensor in program order with a non-finite value, and Value is that
	// value. What is the kind of tensor ("forward value", "gradient", "parameter", "optimizer
	// state" or "loss"). Operation wrote it, on Rank. Rank is −1 and the other fields are empty
	// if running the step again gave only finite values.
	Tensor, What, Operation string
	Rank                    int
	Value                   float64
	// Skipped is how many steps in a row, this one included, were not finite or overflowed in
	// fp16. Skips says that the run skips such steps: Config.OnNonFinite.
	Skipped int
	Skips   bool
	// Update says that the step itself was finite but its update was not.
	Update bool
	// Overwritten says that updates overlapped with the backward had already changed the
	// parameters. Tensor was then found from the optimizer's states that its gradient changed.
	Overwritten bool
	// LossScale is the scale at which an fp16 step overflowed and which cannot be lowered; 0 in
	// other precisions.
	LossScale float64
}

func (e *Diverged) Error() string {
	var b strings.Builder
	if e.Update {
		fmt.Fprintf(&b, "the update of step %d is not finite", e.Step)
	} else {
		fmt.Fprintf(&b, "step %d is not finite (loss %v", e.Step, float32(e.Loss))
		if e.GradNorm != 0 {
			fmt.Fprintf(&b, ", gradient norm %v", e.GradNorm)
		}
		b.WriteString(")")
	}
	switch {
	case e.Rank < 0:
		b.WriteString(": computed once more, every value is finite, so the machine may have failed")
	case e.What == "loss":
		fmt.Fprintf(&b, ": first the loss, by operation %s on rank %d, is %v", e.Operation, e.Rank, e.Value)
	default:
		fmt.Fprintf(&b, ": first the %s %s, by operation %s on rank %d, is %v", e.What, e.Tensor, e.Operation, e.Rank, e.Value)
	}
	if e.LossScale != 0 {
		fmt.Fprintf(&b, "; it overflowed at a loss scale of %g", e.LossScale)
	}
	switch {
	case e.Skipped > 1 && e.LossScale != 0:
		fmt.Fprintf(&b, ", as each of the last %d steps did at its own", e.Skipped)
	case e.Skipped > 1:
		fmt.Fprintf(&b, "; none of the last %d steps was finite", e.Skipped)
	}
	b.WriteString("; nothing computed from it was saved; ")
	if e.LossScale > 1 { // a dynamic scale would have been halved
		b.WriteString("Config.LossScale dynamic, or a smaller one, often helps")
		return b.String()
	}
	b.WriteString("a lower Config.LR or Config.Clip 1 often helps")
	if !e.Skips && e.LossScale == 0 && !e.Update {
		b.WriteString(", and Config.OnNonFinite skip leaves single steps out")
	}
	return b.String()
}

func isFinite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }
