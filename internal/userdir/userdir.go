// Package userdir returns the user's home, configuration and cache folders; tests can replace them.
// The go command reuses a cached test result for another user if the test never reads the real
// folders.
package userdir

import (
	"errors"
	"os"
	"sync/atomic"
)

// Folders are a user's folders; "" means unknown.
type Folders struct {
	Home, Config, Cache string
}

var instead atomic.Pointer[Folders]

// Use replaces the user's folders for the complete process and returns a function that undoes it.
func Use(f Folders) (undo func()) {
	before := instead.Swap(&f)
	return func() { instead.Store(before) }
}

// Home returns os.UserHomeDir, or its replacement.
func Home() (string, error) { return folder(os.UserHomeDir, func(f *Folders) string { return f.Home }) }

// Config returns os.UserConfigDir, or its replacement.
func Config() (string, error) {
	return folder(os.UserConfigDir, func(f *Folders) string { return f.Config })
}

// Cache returns os.UserCacheDir, or its replacement.
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
