package processes

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// Excessive or endless inputs are rejected with a short line before any resource is used.
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
		"an underscore":     {tinyWith("--lr", "1_0"), `--lr "1_0": a plain decimal number is needed`},
		"a hexadecimal":     {tinyWith("--clip", "0x1p4"), `--clip "0x1p4": a plain decimal number is needed`},
		"an octal":          {tinyWith("--seq", "010"), `--seq "010": a plain decimal number is needed`},
		"a share's number":  {tinyWith("--offload", "optimizer=host:6_0%"), `"6_0%" is not a share of the class`},
		"in a file":         {[]string{"train", "--config", writeFile(t, "c.yaml", "steps: 2\nlr: 1_0\n")}, `c.yaml:2: --lr "1_0": a plain decimal number is needed`},
		"another command":   {[]string{"bench", "comm", "--ranks", "0b10"}, `--ranks "0b10": a plain decimal number is needed`},
		"a range":           {tinyWith("--freeze", "h.{0-9999999999}.*"), "a range of numbers ends at 999999 at most"},
		"a range to drop":   {tinyWith("--recompute", "drop:h.{0-9999999999}"), "a range of numbers ends at 999999 at most"},
		"many stars":        {tinyWith("--recompute", "drop:"+strings.Repeat("*", 300)), "a pattern of 300 characters; at most 256 are possible"},
		"stars of units":    {tinyWith("--recompute", "full:"+strings.Repeat("*", 300)), "a pattern of 300 characters; at most 256 are possible"},
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

// Values of a configuration file are cut and escaped as those of the command line, whether their
// flag or the run rejects them.
func TestLongValuesOfAFile(t *testing.T) {
	long := strings.Repeat("z", 150)
	for key, text := range map[string]string{
		"lr": long, "device-memory": long, "zero": long, "timeout": long, "optimizer": long, "model": long, "order": long,
		"offload": "optimizer=" + long, "recompute": "drop:" + long + "[", "freeze": long + "[", "frozen-cache": long, "precision": long, long: "1",
	} {
		t.Run(key[:2], func(t *testing.T) {
			got := command(tinyWith("--config", writeFile(t, "c.yaml", key+": \""+text+"\"\n"))...)
			if given := slices.Contains(tinyRun, "--"+key); given {
				got = command("train", "--config", writeFile(t, "c.yaml", key+": \""+text+"\"\n"))
			}
			require.Equal(t, 1, got.status, got.stderr)
			require.NotContains(t, got.stderr, strings.Repeat("z", 81))
			require.Contains(t, got.stderr, strings.Repeat("z", 60), "says what it was given")
		})
	}
	got := command("train", "--config", writeFile(t, "c.yaml", `optimizer: "x\nspillway: all is well"`))
	require.Equal(t, 1, strings.Count(got.stderr, "\n"), got.stderr)
}

// An unknown SIMD level is rejected, not ignored.
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
