// Package userdir returns the user's home, configuration and cache folders; tests can replace
// them. A test that never asks for the real ones need not run again for another user, and go
// test's cache knows that.
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

// Use replaces the user's folders for the whole process and returns a function that undoes it.
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
