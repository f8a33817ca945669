//go:build !linux

package store

import (
	"errors"
	"os"
	"runtime"
)

type opened struct {
	file     *os.File
	name     string
	direct   bool
	memAlign int
	why      string
}

func openFile(dir string, _ int, _ Options) (opened, error) {
	return opened{}, &Error{Op: "create a file in", File: dir, Len: -1,
		Err: errors.New("the disk tier needs files without a name, preallocation and direct I/O as Linux has them; this is " + runtime.GOOS)}
}

func removeStale(string) {}

func (f *Folder) lockFolder() (bool, error) { return true, nil }

func (f *Folder) alone() bool { return true }

func preallocate(*os.File, int64) error { return errors.ErrUnsupported }

func freeText(*os.File) string { return "" }

func probeDirect(*os.File, int) string { return "" }

func clearDirect(*os.File) error { return errors.ErrUnsupported }

func mapPages(n int) ([]byte, error) { return make([]byte, n), nil }

func unmapPages([]byte) error { return nil }
