package processes

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/traced"
)

// Checkpoints, the lock, the marks and the disk tier are made, renamed and removed within open
// folders, never by a path. The test traces train, a job of two processes, and ckpt reshard.
func TestNothingIsChangedByPath(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	program, err := built()
	require.NoError(t, err)
	top := t.TempDir()
	ck, disk := filepath.Join(top, "made", "ck"), filepath.Join(top, "tier")
	train := tinyWith("--steps", "3", "--save-every", "1", "--keep", "1", "--checkpoint", ck, "--offload", "optimizer=disk", "--disk", disk)
	on := tinyWith("--steps", "5", "--save-every", "1", "--keep", "1", "--checkpoint", ck, "--resume", "--offload", "optimizer=disk", "--disk", disk)
	ours := `step-0|\.spillway|rank-0|manifest|\.writing|\.gone|O_TMPFILE|` + regexp.QuoteMeta(top)
	for _, args := range [][]string{
		train,
		append([]string{"launch", "-n", "2", "--restarts", "1", "--"}, on...),
		{"ckpt", "reshard", ck, "--ranks", "2"},
	} {
		require.Greater(t, traced.NothingByPath(t, exec.Command(program, args...), ours), 3, "%q", args)
	}
}
