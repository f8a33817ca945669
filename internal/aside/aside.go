// Package aside replaces a file's contents completely or not at all: it writes a temporary file in
// the same folder and renames it when it is complete.
package aside

import (
	"errors"
	"io"
	"os"
)

// Write gives the file at path the contents that the function write writes, with permissions perm
// less the umask. After an error the old file is unchanged and no temporary file remains.
func Write(path string, perm os.FileMode, write func(io.Writer) error) (err error) {
	f, err := Create(path, perm)
	if err != nil {
		return err
	}
	if err := write(f); err != nil {
		return errors.Join(err, f.Cleanup())
	}
	if err := f.CloseAtomicallyReplace(); err != nil {
		return errors.Join(err, f.Cleanup())
	}
	return nil
}

// WriteBytes does the same as Write for contents in memory.
func WriteBytes(path string, contents []byte, perm os.FileMode) error {
	return Write(path, perm, func(w io.Writer) error {
		_, err := w.Write(contents)
		return err
	})
}
