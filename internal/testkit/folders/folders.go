// Package folders has test implementations of the folders of package internal/filesys:
//
//	Memory   a tree in memory
//	Record   another folder, with a log of what changed it and what was synced
//	Fault    another folder, one of whose operations fails
//
// What a power loss may leave of a logged run is enumerated by Log.States.
package folders

import (
	"io/fs"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// At opens the folders below root: paths must begin with root's path. Other paths do not exist. The
// caller closes root.
func At(root filesys.Folder) filesys.Opener { return opener{root} }

type opener struct{ root filesys.Folder }

func (o opener) Open(path string) (filesys.Folder, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	below, err := filepath.Rel(o.root.Path(), abs)
	if err != nil || !filepath.IsLocal(below) {
		return nil, fail("open", path, syscall.ENOENT)
	}
	var at filesys.Folder = unclosed{o.root}
	for _, name := range strings.Split(below, string(filepath.Separator)) {
		if name == "." {
			continue
		}
		sub, err := at.Sub(name)
		if cerr := at.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			return nil, err
		}
		at = sub
	}
	return at, nil
}

// unclosed is a folder whose Close does nothing, because another owner closes it.
type unclosed struct{ filesys.Folder }

func (unclosed) Close() error { return nil }

func fail(op, path string, err error) error { return &fs.PathError{Op: op, Path: path, Err: err} }
