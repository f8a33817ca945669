package train

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/platform"
)

// Kinds of errors, for errors.Is. They stay, whatever an error says.
var (
	// ErrConfig is of a Config that no run could have.
	ErrConfig = errors.New("the configuration is refused")
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

// FieldError refuses what a Config says. It is of kind ErrConfig, and its text names each
// field that it speaks of as Config.NAME: what the field holds, what is wrong with it and
// what would be right.
type FieldError struct {
	Field string // "Precision"; the first of several that don't go together
	err   error
}

func (e *FieldError) Error() string { return e.err.Error() }

// Is puts the error among the kinds.
func (e *FieldError) Is(target error) bool { return target == ErrConfig }

// Unwrap returns what was wrong with the field's value by itself, if there is more to it.
func (e *FieldError) Unwrap() error { return errors.Unwrap(e.err) }

// refuse makes a *FieldError of a sentence that begins with the field, as in
// "Config.Zero 4: …".
func refuse(format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	first, _, _ := strings.Cut(err.Error(), " ")
	return &FieldError{strings.TrimSuffix(strings.TrimPrefix(first, "Config."), ":"), err}
}

// refuseField is refuse for a sentence that begins with something else.
func refuseField(field, format string, args ...any) error {
	return &FieldError{field, fmt.Errorf(format, args...)}
}

// ofKind is an error of a kind, with its own text.
type ofKind struct {
	error
	kind error
}

// Is tells whether target is the kind.
func (e *ofKind) Is(target error) bool { return target == e.kind }
func (e *ofKind) Unwrap() error        { return e.error }

// Is puts the error among the kinds.
func (e *Diverged) Is(target error) bool { return target == ErrDiverged }

// Is puts the error among the kinds.
func (e *MachineTooSmall) Is(target error) bool { return target == ErrDoesNotFit }

// Is puts the error among the kinds.
func (e *NothingFits) Is(target error) bool { return target == ErrDoesNotFit }
