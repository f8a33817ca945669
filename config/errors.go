package config

import (
	"errors"
	"fmt"
	"strings"
)

// ErrRefused is of a Config that no run could have.
var ErrRefused = errors.New("the configuration is refused")

// FieldError refuses what a Config says. It is of kind ErrConfig, and its text names each
// field that it speaks of as Config.NAME: what the field holds, what is wrong with it and
// what would be right.
type FieldError struct {
	Field string // "Precision"; the first of several that don't go together
	// Instead are fields that make the configuration valid, as in "Reproducible" or "Batch=2";
	// nil: none are known.
	Instead []string
	err     error
}

func (e *FieldError) Error() string { return e.err.Error() }

// Is puts the error among the kinds.
func (e *FieldError) Is(target error) bool { return target == ErrRefused }

// Unwrap returns what was wrong with the field's value by itself, if there is more to it.
func (e *FieldError) Unwrap() error { return errors.Unwrap(e.err) }

// Refuse makes a *FieldError of a sentence that begins with the field, as in
// "Config.Zero 4: …".
func Refuse(format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	first, _, _ := strings.Cut(err.Error(), " ")
	return &FieldError{Field: strings.TrimSuffix(strings.TrimPrefix(first, "Config."), ":"), err: err}
}

// RefuseField is refuse for a sentence that begins with something else.
func RefuseField(field, format string, args ...any) error {
	return &FieldError{Field: field, err: fmt.Errorf(format, args...)}
}

// OfKind makes an error one of a kind. It keeps its own text.
func OfKind(err, kind error) error { return &kindError{err, kind} }

// kindError is an error of a kind, with its own text.
type kindError struct {
	error
	kind error
}

// Is tells whether target is the kind.
func (e *kindError) Is(target error) bool { return target == e.kind }

func (e *kindError) Unwrap() error { return e.error }
