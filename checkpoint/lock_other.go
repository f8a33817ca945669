//go:build !unix

package checkpoint

import (
	"errors"
	"os"
)

func tryLock(*os.File) (bool, error) {
	return false, errors.New("checkpoint folders can't be locked on this system; two runs could write there at once")
}

const noFollow = 0
