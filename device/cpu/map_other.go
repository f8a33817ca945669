//go:build !unix

package cpu

import (
	"errors"
	"runtime"
)

type mapping struct {
	data []byte
	size int64
}

func mapMemory(int64) (mapping, error) {
	return mapping{}, errors.New("the CPU device needs memory mappings, which it has on Linux and other Unix systems only, not on " + runtime.GOOS)
}

func (mapping) unmap() error { return nil }

func (c *Context) pin(mapping) error {
	if c.opts.RequirePinned {
		return &PinError{Advice: "only Unix systems are supported", Err: errors.New("no system call for it on " + runtime.GOOS)}
	}
	return nil
}
