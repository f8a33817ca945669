package hostmem

import (
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// The lowest memory limit counts, in either version of control groups, at any level of the
// hierarchy.
func TestGroupMemory(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		want  int64
	}{
		"none":                  {map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, math.MaxInt64},
		"a container's own":     {map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1000\n"}, 1000},
		"nested":                {map[string]string{"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "2000\n", "sys/fs/cgroup/a/memory.max": "3000\n"}, 2000},
		"the outer is less":     {map[string]string{"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/memory.max": "900\n"}, 900},
		"version 1":             {map[string]string{"proc/self/cgroup": "7:cpu,memory:/x\n1:name=systemd:/\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "60000000\n"}, 60000000},
		"version 1, container":  {map[string]string{"proc/self/cgroup": "7:memory:/docker/0123\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000\n"}, 5000},
		"both":                  {map[string]string{"proc/self/cgroup": "7:memory:/x\n0::/y\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "70\n", "sys/fs/cgroup/unified/y/memory.max": "50\n"}, 50},
		"version 1 has no max":  {map[string]string{"proc/self/cgroup": "7:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 9223372036854771712},
		"no such file anywhere": {nil, math.MaxInt64},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for file, text := range c.files {
				require.NoError(t, os.MkdirAll(filepath.Join(root, filepath.Dir(file)), 0o700))
				require.NoError(t, os.WriteFile(filepath.Join(root, file), []byte(text), 0o600))
			}
			require.Equal(t, c.want, groupMemory(root, "/proc/self/cgroup"))
		})
	}
}
