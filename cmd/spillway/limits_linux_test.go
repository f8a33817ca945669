package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// What asks for more than anybody can mean, or never ends, is refused in a short
// line before it takes anything.
func TestLimits(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	model := t.TempDir()
	require.NoError(t, syscall.Mkfifo(filepath.Join(model, "config.json"), 0o600))
	for name, c := range map[string]struct {
		args []string
		says string
	}{
		"brackets":          {[]string{"train", "--config", writeFile(t, "c.yaml", "a: "+strings.Repeat("[", 100000))}, "line 1 nests deeper than 100 levels"},
		"lists in lists":    {[]string{"train", "--config", writeFile(t, "c.yaml", "a:\n"+strings.Repeat("- ", 100000)+"b")}, "line 2 nests deeper than 100 levels"},
		"a long file":       {[]string{"train", "--config", writeFile(t, "c.yaml", "model: "+strings.Repeat("x", 1<<20))}, "more than 1048576 bytes"},
		"a pipe as config":  {[]string{"train", "--config", pipe}, "is not a regular file (it is a pipe)"},
		"a pipe as data":    {tinyWith("--data", pipe), "pipe"},
		"a pipe as model":   {tinyWith("--model", model), "not a regular file"},
		"a device as data":  {tinyWith("--data", "/dev/zero"), "neither a regular file nor a folder"},
		"rows of the world": {tinyWith("--fit", "--global-batch", "9223372036854775807"), "--global-batch 9223372036854775807: at most 1048576 rows are possible"},
		"a long value":      {tinyWith("--offload", "optimizer=host:"+strings.Repeat("9", 5000)), "--offload"},
		"a forged line":     {tinyWith("--recompute", "full\nspillway: all is well"), "--recompute"},
		"an escape":         {tinyWith("--model", "\x1b[31mred"), "--model"},
	} {
		t.Run(name, func(t *testing.T) {
			got := command(c.args...)
			require.Equal(t, 1, got.status, got.stderr)
			require.Contains(t, got.stderr, c.says)
			require.Less(t, len(got.stderr), 1500)
			require.Equal(t, 1, strings.Count(got.stderr, "\n"), got.stderr)
			require.NotContains(t, got.stderr, "\x1b")
		})
	}
}

// An unknown level of SIMD is refused, not left out.
func TestUnknownSIMDLevel(t *testing.T) {
	path, err := built()
	require.NoError(t, err)
	p := &process{}
	p.Cmd = exec.Command(path, tinyRun...)
	p.Env = append(os.Environ(), "SPILLWAY_SIMD=zzz")
	p.Stdout, p.Stderr = &p.out, &p.errs
	require.NoError(t, p.Start())
	require.Equal(t, 1, p.end(t))
	require.Contains(t, p.errs.String(), `no SIMD level "zzz"`)
}
