package processes

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// If a job's checkpoint folder is moved away and removed, the job saves to a new one at the same
// path. An interrupt saves the last step there.
func TestTheFolderOfAJobVanishes(t *testing.T) {
	t.Parallel()
	top := t.TempDir()
	ck, away := filepath.Join(top, "ck"), filepath.Join(top, "away")
	p := start(t, launched(2, tinyWith("--steps", "1000000", "--save-every", "5", "--checkpoint", ck)...)...)
	saves := func() bool {
		list, err := filepath.Glob(filepath.Join(ck, "step-*"))
		return err == nil && len(list) > 0
	}
	waitFor(t, "checkpoint", saves)
	require.NoError(t, os.Rename(ck, away))
	waitFor(t, "removal", func() bool { return os.RemoveAll(away) == nil }) // a save may be under way in it
	waitFor(t, "checkpoint in the new folder", saves)
	require.NoError(t, p.Process.Signal(os.Interrupt))
	require.Equal(t, 130, p.end(t), p.errs.String())
	require.Contains(t, p.errs.String(), "the checkpoint in "+ck+" has it")
	got := command("ckpt", "verify", ck)
	require.Zero(t, got.status, got.stderr)
}
