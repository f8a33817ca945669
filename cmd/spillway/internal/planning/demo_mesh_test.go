package planning_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// Given flags override conflicting values of the demo. With tensor ranks or a pipeline it generates
// no sample, and with a pipeline it uses ZeRO 1.
func TestDemoOverAMesh(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, flags := range [][]string{{"--tensor", "2"}, {"--pipeline", "2"}} {
		r := command(append([]string{"train", "--steps", "1", "--checkpoint", "none"}, flags...)...)
		require.Zero(t, r.status, r.stderr)
		require.NotContains(t, r.stdout, "sample, continuing")
	}
}

// A page is written even if the effort was used up before another plan was tried.
func TestPageOfAPlanWithoutEffort(t *testing.T) {
	page := filepath.Join(t.TempDir(), "plan.html")
	r := command("plan", "--model", "spillway-demo", "--ranks", "2", "--effort", "1", "--html", page)
	require.Zero(t, r.status, r.stderr)
	require.Contains(t, r.stdout, "fits as requested; nothing else was planned")
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	require.NotContains(t, string(text), ">Recommended<")
}
