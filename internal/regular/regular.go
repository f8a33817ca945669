// Package regular opens files that must be regular: a pipe or a device where a
// file is meant would wait for a writer, or never end.
package regular

import (
	"fmt"
	"os"
)

// Open opens a regular file, or a link to one, for reading. What it opens is what
// it looked at: nobody can put a pipe there in between.
func Open(path string) (*os.File, error) {
	f, err := open(path)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file (%s)", path, kind(st.Mode()))
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

func kind(m os.FileMode) string {
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
