package spillway

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

func TestZZDump(t *testing.T) {
	dir := os.Getenv("SPINE_DUMP")
	if dir == "" {
		t.Skip()
	}
	require.NoError(t, os.MkdirAll(dir, 0o755))
	bad := regexp.MustCompile(`[^a-zA-Z0-9]+`)
	for _, c := range recordedConfigs() {
		cc := c.Config
		if cc.Offload != "" {
			cc.Disk = t.TempDir()
		}
		b, err := Build(cc)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, bad.ReplaceAllString(c.name, "_")+".txt"), []byte(graph.Format(b.Program)), 0o644))
	}
}
