// Package regular opens files that must be regular. A pipe or a device instead of a file could
// block or never end.
package regular

import (
	"fmt"
	"io"
	"os"
)

// Open opens a regular file, or a link to one, for reading. It checks the opened file, so
// nobody can substitute a pipe in between.
func Open(path string) (*os.File, error) {
	f, err := open(path)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file (%s)", path, Kind(st.Mode()))
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// Kind names a type of file that is not regular, for errors.
func Kind(m os.FileMode) string {
	switch {
	case m.IsDir():
		return "it is a folder"
	case m&os.ModeNamedPipe != 0:
		return "it is a pipe"
	case m&os.ModeSocket != 0:
		return "it is a socket"
	case m&os.ModeDevice != 0:
		return "it is a device"
	}
	return m.Type().String()
}

// ReadFile reads a regular file of at most max bytes.
func ReadFile(path string, max int64) ([]byte, error) {
	f, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, max+1))
	if err == nil && int64(len(text)) > max {
		err = fmt.Errorf("%s has more than %d bytes", path, max)
	}
	return text, err
}
