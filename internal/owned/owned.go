// Package owned tells whether a folder or file is the user's own: what is loaded
// as code must not be another's to change.
package owned

import (
	"fmt"
	"io/fs"
	"os"
)

// Error says why a folder or file is not used.
type Error struct{ Path, Reason string }

func (e *Error) Error() string { return fmt.Sprintf("%.80q %s", e.Path, e.Reason) }

// Check returns an *Error where what st describes, found at path, belongs to another
// user or may be written by the group or by everybody. On systems without such
// owners and modes it returns nil.
func Check(path string, st fs.FileInfo) error {
	if reason := foreign(st); reason != "" {
		return &Error{path, reason}
	}
	return nil
}

// Folder is Check of the folder at path; one that is not there, or cannot be looked
// at, is not another's.
func Folder(path string) error {
	st, err := os.Stat(path)
	if err != nil {
		return nil
	}
	return Check(path, st)
}

// Make makes the folder at path, for the user alone, and checks it: it may have been
// there.
func Make(path string) error {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return err
	}
	return Folder(path)
}
