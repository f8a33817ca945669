// Package owned checks that a folder or file belongs only to the user: code must not be loaded from
// files that other users can change.
package owned

import (
	"fmt"
	"io/fs"
	"os"
)

// Error gives the reason why a folder or file is not trusted.
type Error struct{ Path, Reason string }

func (e *Error) Error() string { return fmt.Sprintf("%.80q %s", e.Path, e.Reason) }

// Check returns an *Error if the file at path, described by st, belongs to another user or is
// writable by group or others. On systems without such owners and modes it returns nil.
func Check(path string, st fs.FileInfo) error {
	if reason := foreign(st); reason != "" {
		return &Error{path, reason}
	}
	return nil
}

// Folder does the same as Check for the folder at path. A folder that does not exist or can't be
// examined passes.
func Folder(path string) error {
	st, err := os.Stat(path)
	if err != nil {
		return nil
	}
	return Check(path, st)
}

// Make creates the folder at path with access only for the user. It also checks it, since the
// folder may have existed before.
func Make(path string) error {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return err
	}
	return Folder(path)
}
