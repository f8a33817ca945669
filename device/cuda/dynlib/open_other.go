//go:build !linux

package dynlib

import (
	"errors"
	"runtime"
)

var errSystem = errors.New("libraries of CUDA are opened on Linux only, not on " + runtime.GOOS)

func open(string) (uintptr, error) { return 0, errSystem }

func symbol(uintptr, string) (uintptr, error) { return 0, errSystem }

func preload(string) error { return errSystem }
