package cli

import (
	"fmt"
	"io/fs"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/plan"
)

// A full disk, or one that fails to write, is a run-time fault in any command; an unreadable file
// is bad input.
func TestStatusOfABrokenDisk(t *testing.T) {
	for _, c := range []struct {
		err  error
		want int
	}{
		{&fs.PathError{Op: "write", Path: "a", Err: syscall.ENOSPC}, ExitFault},
		{&fs.PathError{Op: "open", Path: "a", Err: syscall.EDQUOT}, ExitFault},
		{&fs.PathError{Op: "write", Path: "a", Err: syscall.EFBIG}, ExitFault},
		{&fs.PathError{Op: "sync", Path: "a", Err: syscall.EIO}, ExitFault},
		{&fs.PathError{Op: "read", Path: "a", Err: syscall.EIO}, ExitBadInput},
		{&fs.PathError{Op: "open", Path: "a", Err: syscall.EACCES}, ExitBadInput},
		{fmt.Errorf("%w: %w", plan.ErrDoesNotFit, syscall.ENOSPC), ExitDoesNotFit},
	} {
		require.Equal(t, c.want, ExitStatus(fmt.Errorf("export: %w", c.err)), c.err)
	}
}
