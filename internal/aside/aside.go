// Package aside gives a file new contents whole or not at all: they are written
// into a file beside it, which takes its name when it is complete.
//
// It is google/renameio with the new file always in the old one's folder, and an
// equal of it on Windows, which renameio does not have.
package aside

import (
	"errors"
	"io"
	"os"
)

// Write gives the file at path the contents that write writes, and the rights that
// the umask leaves of perm. An error leaves nothing but the file that was there
// before.
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

// WriteBytes is Write of contents at hand.
func WriteBytes(path string, contents []byte, perm os.FileMode) error {
	return Write(path, perm, func(w io.Writer) error {
		_, err := w.Write(contents)
		return err
	})
}
