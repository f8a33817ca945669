// Package cli holds the parts that all commands share: help, errors and exit statuses, signals, the
// terminal.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"syscall"

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

// StatusError is the exit status of a job whose processes have printed their errors themselves.
type StatusError int

func (e StatusError) Error() string { return fmt.Sprintf("status %d", int(e)) }

// Exit statuses.
const (
	ExitDone        = 0
	ExitBadInput    = 1
	ExitDoesNotFit  = 2 // or a damaged checkpoint, or a run that differs from its receipt
	ExitFault       = 3 // a rank was lost, or a run-time fault
	ExitInterrupted = 130
)

// ExitStatus returns the exit status of a process that ends with err.
func ExitStatus(err error) int {
	status, told := errors.AsType[StatusError](err)
	remote, isRemote := errors.AsType[*ranks.RemoteError](err)
	switch {
	case err == nil:
		return ExitDone
	case told:
		return int(status)
	case errors.Is(err, context.Canceled):
		return ExitInterrupted
	case is[*platform.MissingDevice](err):
		return ExitBadInput
	case is[*plan.DoesNotFit](err), errors.Is(err, plan.ErrDoesNotFit), errors.Is(err, checkpoint.ErrDamaged),
		errors.Is(err, receipt.ErrDiffers), isRemote && remote.DoesNotFit():
		return ExitDoesNotFit
	case isRemote && remote.Fault(), errors.Is(err, comm.ErrLost),
		is[*device.OpError](err), is[*faultError](err), is[*store.Error](err), is[*cpu.PinError](err), is[*driver.Error](err),
		cannotWrite(err), errors.Is(err, ranks.ErrDiverged), errors.Is(err, comm.ErrTimeout),
		errors.Is(err, comm.ErrAborted), errors.Is(err, comm.ErrMismatch):
		return ExitFault
	}
	return ExitBadInput
}

// cannotWrite reports whether a write failed because the disk is full or broken. A failed read
// counts as bad input instead.
func cannotWrite(err error) bool {
	for _, full := range []error{syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG} {
		if errors.Is(err, full) {
			return true
		}
	}
	at, ok := errors.AsType[*fs.PathError](err)
	return ok && errors.Is(at.Err, syscall.EIO) && slices.Contains([]string{"write", "sync", "close", "truncate", "allocate", "mkdir"}, at.Op)
}

// is reports whether err is or wraps an error of type E.
func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

// faultError marks an error at run time, as opposed to bad input.
type faultError struct{ err error }

func (e *faultError) Error() string { return e.err.Error() }

func (e *faultError) Unwrap() error { return e.err }

// Fault marks an error as one at run time; nil stays nil.
func Fault(err error) error {
	if err == nil {
		return nil
	}
	return &faultError{err}
}

// Interrupted is the message of a command that a signal ended.
type Interrupted string

func (e Interrupted) Error() string { return string(e) }

func (e Interrupted) Unwrap() error { return context.Canceled }

// SilentError ends a process that prints no error, because another process of its job prints it.
type SilentError struct{ Err error }

func (e *SilentError) Error() string { return e.Err.Error() }

func (e *SilentError) Unwrap() error { return e.Err }
