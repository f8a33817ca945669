package train

import (
	"errors"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/platform"
)

// Kinds of errors, for errors.Is. They stay, whatever an error says.
var (
	// ErrConfig is of a Config that no run could have.
	ErrConfig = config.ErrRefused
	// ErrDoesNotFit is of plans over a cap (plan.DoesNotFit), of searches that find none
	// within it, and of machines that are too small.
	ErrDoesNotFit = plan.ErrDoesNotFit
	// ErrNoDevice is of a device, or a library that it needs, that is not on this machine.
	ErrNoDevice = platform.ErrNoDevice
	// ErrDiverged is of a run whose loss, gradient norm or update is not finite.
	ErrDiverged = errors.New("the run diverged")
	// ErrDamaged is of a checkpoint that is there and not whole.
	ErrDamaged = checkpoint.ErrDamaged
	// ErrLost is of a job over processes of which one is gone.
	ErrLost = comm.ErrLost
)

// Is puts the error among the kinds.
func (e *Diverged) Is(target error) bool { return target == ErrDiverged }

// Is puts the error among the kinds.
func (e *MachineTooSmall) Is(target error) bool { return target == ErrDoesNotFit }

// ErrStop, returned by what Run tells its steps, ends the run in good order: with a
// checkpoint, where one is configured, and no error.
var ErrStop = errors.New("the run is to stop here")
