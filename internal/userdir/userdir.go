// Package userdir is where the user's own folders are asked for. Tests put others in
// their place: one that never asked where the user's are has no need to run again for
// another user, and go test knows that.
package userdir

import (
	"errors"
	"os"
	"sync/atomic"
)

// Folders are a user's; one that is "" is not known.
type Folders struct {
	Home, Config, Cache string
}

var instead atomic.Pointer[Folders]

// Use puts folders in place of the user's, for all of the process, and returns what
// undoes that.
func Use(f Folders) (undo func()) {
	before := instead.Swap(&f)
	return func() { instead.Store(before) }
}

// Home is os.UserHomeDir.
func Home() (string, error) { return folder(os.UserHomeDir, func(f *Folders) string { return f.Home }) }

// Config is os.UserConfigDir.
func Config() (string, error) {
	return folder(os.UserConfigDir, func(f *Folders) string { return f.Config })
}

// Cache is os.UserCacheDir.
func Cache() (string, error) {
	return folder(os.UserCacheDir, func(f *Folders) string { return f.Cache })
}

func folder(user func() (string, error), of func(*Folders) string) (string, error) {
	f := instead.Load()
	if f == nil {
		return user()
	}
	if dir := of(f); dir != "" {
		return dir, nil
	}
	return "", errUnknown
}

var errUnknown = errors.New("the user has no such folder")
