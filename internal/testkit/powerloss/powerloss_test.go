package powerloss

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/folders"
)

// After any file operation of a run that saves, prunes, diverges, is interrupted and
// resumed, and whatever of what was not synced is lost, torn or reordered: a resume
// finds the newest acknowledged checkpoint, or the one that was being saved, with its
// bits; nothing half bears a checkpoint's name, and what is left over is cleared. A
// store that leaves out a kind of sync is found out.
func TestEveryStateThatALossOfPowerLeaves(t *testing.T) {
	s := tell(t)
	log := s.rec.Log()
	n, err := log.States(s.base, folders.Bounds{Every: 6}, s.holds)
	require.NoError(t, err)
	t.Logf("%d states of %d operations", n, log.Len())
	require.Greater(t, n, 1000)

	in := func(op folders.Op, name string) bool {
		return strings.Contains(op.Path, string(filepath.Separator)+name)
	}
	for what, drop := range map[string]func(folders.Op) bool{
		"of files":         func(op folders.Op) bool { return op.What == "sync" },
		"of folders":       func(op folders.Op) bool { return op.What == "sync folder" },
		"of ranks' files":  func(op folders.Op) bool { return op.What == "sync" && in(op, "rank-") },
		"of manifests":     func(op folders.Op) bool { return op.What == "sync" && in(op, "manifest.json") },
		"of config.json":   func(op folders.Op) bool { return op.What == "sync" && in(op, "config.json") },
		"of the marks":     func(op folders.Op) bool { return op.What == "sync" && in(op, ".spillway-marks") },
		"of a checkpoint":  func(op folders.Op) bool { return op.What == "sync folder" && in(op, ".writing-") },
		"of checkpoints":   func(op folders.Op) bool { return op.What == "sync folder" && op.Path == s.ck },
		"of their parents": func(op folders.Op) bool { return op.What == "sync folder" && !strings.HasPrefix(op.Path, s.ck) },
	} {
		found := errors.New("found")
		_, err := log.Without(drop).States(s.base, folders.Bounds{Every: 3}, func(st folders.State) error {
			if err := s.holds(st); err != nil {
				return errors.Join(found, err)
			}
			return nil
		})
		require.ErrorIs(t, err, found, "a store without syncs %s", what)
		t.Logf("without syncs %s: %.300s", what, strings.ReplaceAll(err.Error(), s.base, ""))
	}
}
