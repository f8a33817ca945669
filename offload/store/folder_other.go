//go:build !linux

package store

import (
	"errors"
	"os"
	"runtime"

	"github.com/spillway-ml/spillway/internal/filesys"
)

type opened struct {
	file     filesys.File
	name     string
	direct   bool
	memAlign int
	why      string
}

func openFile(in filesys.Folder, _ int, _ Options) (opened, error) {
	return opened{}, &Error{Op: "create a file in", File: in.Path(), Len: -1,
		Err: errors.New("the disk tier needs files without a name, preallocation and direct I/O as Linux has them; this is " + runtime.GOOS)}
}

func removeStale(filesys.Folder) {}

func (f *Folder) lockFolder() (ok bool, err error) {
	f.lock, err = f.f.OpenFile(".", os.O_RDONLY, 0)
	return err == nil, err
}

func (f *Folder) alone() bool { return true }

func freeText(filesys.File) string { return "" }

func probeDirect(filesys.File, int) string { return "" }
