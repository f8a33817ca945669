package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/spillway-ml/spillway/internal/filesys"
)

var (
	// ErrDamaged is wrapped by errors about a checkpoint whose files do not match its manifest.
	ErrDamaged = errors.New("damaged checkpoint")
	// ErrNewer is wrapped by errors about a complete checkpoint of a later version.
	ErrNewer = errors.New("written by a newer version of Spillway")
)

// faulty wraps err in ErrDamaged, unless this process lacks permission or has too many open
// files: those are no reason to fall back to an older checkpoint.
func faulty(err error) error {
	for _, ours := range []error{os.ErrPermission, filesys.ErrLeads, syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM} {
		if errors.Is(err, ours) {
			return err
		}
	}
	return fmt.Errorf("%w: %w", ErrDamaged, err)
}

// missing returns the error about a checkpoint's folder that can't be opened.
func missing(path string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %s is missing", ErrDamaged, filepath.Join(path, manifestName))
	}
	return faulty(err)
}
