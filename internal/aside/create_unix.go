//go:build !windows

package aside

import (
	"os"
	"path/filepath"

	"github.com/google/renameio/v2"
)

// File is a file beside the one whose place it is to take.
type File = renameio.PendingFile

// Create makes a file beside path, under a name that nobody can foresee.
// CloseAtomicallyReplace syncs it and gives it path's name; Cleanup removes it where
// that did not happen.
func Create(path string, perm os.FileMode) (*File, error) {
	return renameio.NewPendingFile(path, renameio.WithTempDir(filepath.Dir(path)), renameio.WithPermissions(perm))
}
