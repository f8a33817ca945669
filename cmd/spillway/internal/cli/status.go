// Package cli is what all commands share: help, errors and their statuses, signals, the terminal.
package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/receipt"
	ranks "github.com/spillway-ml/spillway/run"
)

// StatusError is the exit status of a job whose processes have told why.
type StatusError int

func (e StatusError) Error() string { return fmt.Sprintf("status %d", int(e)) }

// Exit statuses, as contracted.
const (
	ExitDone        = 0
	ExitBadInput    = 1
	ExitDoesNotFit  = 2 // or a damaged checkpoint, or a run that is not as its receipt says
	ExitFault       = 3 // a rank was lost, or a run-time fault
	ExitInterrupted = 130
)

// ExitStatus is the contracted status of a process that ends with err.
func ExitStatus(err error) int {
	var refused *plan.DoesNotFit
	var op *device.OpError
	var fault *faultError
	var disk *store.Error
	var unpinned *cpu.PinError
	var missing *platform.MissingDevice
	var call *driver.Error
	var status StatusError
	var remote *ranks.RemoteError
	switch {
	case err == nil:
		return ExitDone
	case errors.As(err, &status):
		return int(status)
	case errors.Is(err, context.Canceled):
		return ExitInterrupted
	case errors.As(err, &missing):
		return ExitBadInput
	case errors.As(err, &refused), errors.Is(err, plan.ErrDoesNotFit), errors.Is(err, checkpoint.ErrDamaged), errors.Is(err, receipt.ErrDiffers), errors.As(err, &remote) && remote.DoesNotFit():
		return ExitDoesNotFit
	case errors.As(err, &remote) && remote.Fault(), errors.Is(err, comm.ErrLost):
		return ExitFault
	case errors.As(err, &op), errors.As(err, &fault), errors.As(err, &disk), errors.As(err, &unpinned), errors.As(err, &call), errors.Is(err, ranks.ErrDiverged), errors.Is(err, comm.ErrTimeout), errors.Is(err, comm.ErrAborted), errors.Is(err, comm.ErrMismatch):
		return ExitFault
	}
	return ExitBadInput
}

// faultError marks what went wrong while running, as opposed to bad input.
type faultError struct{ err error }

func (e *faultError) Error() string { return e.err.Error() }

func (e *faultError) Unwrap() error { return e.err }

// Fault marks an error as one of the run; nil stays nil.
func Fault(err error) error {
	if err == nil {
		return nil
	}
	return &faultError{err}
}

// Interrupted is the end that a signal asked for, in words for a person.
type Interrupted string

func (e Interrupted) Error() string { return string(e) }

func (e Interrupted) Unwrap() error { return context.Canceled }

// SilentError ends a process without a word: another one of its job tells.
type SilentError struct{ Err error }

func (e *SilentError) Error() string { return e.Err.Error() }

func (e *SilentError) Unwrap() error { return e.Err }
