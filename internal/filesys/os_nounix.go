//go:build !unix

package filesys

import (
	"errors"
	"os"
)

// Flags of Unix alone.
const (
	NoWait   = 0
	NoFollow = 0
)

func tryLock(*os.File) (bool, error) { return false, errors.ErrUnsupported }
