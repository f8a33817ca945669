package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// Notes quote values as errors do: on one line, escaped and cut.
func TestNotesQuoteWhatTheyWereGiven(t *testing.T) {
	for _, flag := range []string{"--text-field", "--data-glob"} {
		for given, want := range map[string]string{
			"a":                       `"a"`,
			"\x1b[31mred\nspillway:":  `"\x1b[31mred\nspillway:"`,
			strings.Repeat("é ", 250): `"` + strings.Repeat("é ", 40) + `"`,
		} {
			got := command(tinyWith("--steps", "1", flag, given)...)
			require.Zero(t, got.status, got.stderr)
			require.Contains(t, got.stderr, "\n"+flag+" "+want+" changes nothing: ")
			require.NotContains(t, got.stderr, "\x1b")
			for _, line := range strings.Split(got.stderr, "\n") {
				if strings.HasPrefix(line, flag) {
					require.Less(t, utf8.RuneCountInString(line), 240)
				}
			}
		}
	}
}

// The name of a model's folder is printed on one line and escaped, also in a command.
func TestNamesOfModelsAreEscaped(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "a\x1b[31mb\nc")
	require.NoError(t, os.CopyFS(folder, os.DirFS(filepath.Join(testdata, "gpt2"))))
	shown := strings.NewReplacer("\x1b", `\x1b`, "\n", `\n`).Replace(folder)
	got := command(tinyWith("--model", folder, "--steps", "1")...)
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stderr, "model "+shown+": ")
	require.Contains(t, got.stderr, "--init "+shown+" loads the ones in the model's folder\n")
	require.NotContains(t, got.stderr+got.stdout, "\x1b")

	got = command("plan", "--model", folder, "--batch", "1", "--seq", "16")
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stdout, shown+" on 1 CPU rank fits")
	require.Contains(t, got.stdout, " --model $'"+shown+"' ")
	require.NotContains(t, got.stderr+got.stdout, "\x1b")
}

// A preset has no weights, even if a folder of checkpoints has its name, as the demo's has.
func TestAPresetHasNoWeights(t *testing.T) {
	data, err := filepath.Abs(filepath.Join(testdata, "text.txt"))
	require.NoError(t, err)
	dir := t.TempDir()
	got := command(tinyWith("--steps", "1", "--checkpoint", filepath.Join(dir, "spillway-demo"))...)
	require.Zero(t, got.status, got.stderr)
	t.Chdir(dir)
	for model, has := range map[string]bool{"spillway-demo": false, "./spillway-demo": true} {
		got := command("train", "--model", model, "--data", data, "--tokenizer", "bytes", "--steps", "1", "--batch", "1", "--seq", "16")
		require.Zero(t, got.status, got.stderr)
		require.Equal(t, has, strings.Contains(got.stderr, "weights start random"), got.stderr)
	}
}
