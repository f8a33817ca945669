//go:build !linux

package checkpoint

import "os"

// renameNew renames a folder to a name that the caller found free.
func renameNew(from, to string) error { return os.Rename(from, to) }
