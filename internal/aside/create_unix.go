//go:build !windows

package aside

import (
	"os"
	"path/filepath"

	"github.com/google/renameio/v2"
)

// File is a temporary file that is to replace another in the same folder.
type File = renameio.PendingFile

// Create makes a temporary file beside path under an unguessable name. CloseAtomicallyReplace
// syncs it and renames it to path; Cleanup removes it unless that was done.
func Create(path string, perm os.FileMode) (*File, error) {
	return renameio.NewPendingFile(path, renameio.WithTempDir(filepath.Dir(path)), renameio.WithPermissions(perm))
}
