package train

import (
	"errors"

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
