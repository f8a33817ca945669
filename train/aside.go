package train

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"github.com/spillway-ml/spillway/internal/aside"
	"github.com/spillway-ml/spillway/internal/filesys"
)

// canWriteAside makes the folder of the file that writeAside will write, and checks that files
// can be created in it. The file itself is not touched.
func canWriteAside(path string) error {
	st, err := os.Stat(path)
	switch {
	case err == nil && st.IsDir():
		return fmt.Errorf("%.80q is a folder; a file is needed", path)
	case err == nil && !st.Mode().IsRegular():
		return nil // a device or a pipe is written directly; opening a pipe as a test would end its reader
	case err != nil && !errors.Is(err, os.ErrNotExist):
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return err
	}
	return canWriteIn(filepath.Dir(path))
}

// canWriteIn checks that files can be created in a folder.
func canWriteIn(folder string) error {
	d, err := filesys.Open(folder)
	if err != nil {
		return err
	}
	name := aside.TempName()
	f, err := d.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err == nil {
		err = errors.Join(f.Close(), d.Remove(name))
	}
	return errors.Join(err, d.Close())
}

// writeAside replaces a file's contents completely or not at all: it writes a temporary file
// beside it and renames that when it is complete.
func writeAside(path string, write func(io.Writer) error) error {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	if st, err := os.Stat(path); err == nil && !st.Mode().IsRegular() {
		open := func(path string) (*os.File, error) { return os.OpenFile(path, os.O_WRONLY, 0) }
		if st.Mode()&os.ModeNamedPipe != 0 {
			open = openPipe
		}
		f, err := open(path)
		if err != nil {
			return err
		}
		return errors.Join(write(f), f.Close())
	}
	return aside.Write(path, 0o666, write)
}

// openPipe opens a named pipe that has a reader. Without a reader a plain open would block forever
// and ignore signals.
func openPipe(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, syscall.ENXIO) {
		return nil, fmt.Errorf("%.80q is a pipe that nobody reads; start its reader first, or give a file", path)
	}
	return f, err
}
