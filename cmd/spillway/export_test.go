package main

import (
	"crypto/sha256"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
)

// sumsIn returns the SHA-256 of a folder's files, by name.
func sumsIn(t *testing.T, dir string) map[string][32]byte {
	t.Helper()
	list, err := os.ReadDir(dir)
	require.NoError(t, err)
	sums := map[string][32]byte{}
	for _, e := range list {
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		require.NoError(t, err)
		sums[e.Name()] = sha256.Sum256(text)
	}
	require.NotEmpty(t, sums)
	return sums
}

// A run with --export writes the same folder as ckpt export does from its last checkpoint; a resume
// of a completed run writes it too.
func TestTrainExports(t *testing.T) {
	dir := t.TempDir()
	ck, model, by := filepath.Join(dir, "ck"), filepath.Join(dir, "out", "model"), filepath.Join(dir, "by command")
	got := command(tinyWith("--checkpoint", ck, "--export", model)...)
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stdout, "Hugging Face model: "+model+"\n")
	require.Zero(t, command("ckpt", "export", ck, "--to", by).status)
	require.Equal(t, sumsIn(t, by), sumsIn(t, model))

	again := filepath.Join(dir, strings.Repeat("n", 255)) // the longest name that most file systems allow
	require.NoError(t, os.Mkdir(again, 0o755))
	got = command(tinyWith("--checkpoint", ck, "--resume", "--export", again)...)
	require.Zero(t, got.status, got.stderr)
	require.Equal(t, sumsIn(t, by), sumsIn(t, again))
}

// An impossible --export is rejected before the first step.
func TestTrainRefusesToExport(t *testing.T) {
	dir := t.TempDir()
	in := func(names ...string) string { return filepath.Join(append([]string{dir}, names...)...) }
	for words, flags := range map[string][]string{
		"without --checkpoint": {"--export", in("x")},
		"is not empty":         {"--export", in(), "--checkpoint", t.TempDir()},
		"one lies in the other; give a folder elsewhere": {"--export", in("ck", "x"), "--checkpoint", in("ck")},
		"--checkpoint \"" + in("x", "ck"):                {"--export", in("x"), "--checkpoint", in("x", "ck")},
		"--metrics \"" + in("x", "m.jsonl"):              {"--export", in("x"), "--checkpoint", in("ck"), "--metrics", in("x", "m.jsonl")},
		"which --data reads":                             {"--export", in("x"), "--checkpoint", in("ck"), "--data", in()},
	} {
		require.NoError(t, os.WriteFile(in("there"), nil, 0o600))
		got := command(tinyWith(flags...)...)
		require.Equal(t, cli.ExitBadInput, got.status, words)
		require.Contains(t, got.stderr, "--export")
		require.Contains(t, got.stderr, words)
		left, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Len(t, left, 1, "nothing was made")
	}
}

// A folder that cannot be created is detected before the first step too.
func TestTrainSeesWhereItExports(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(dir, "link")
	require.NoError(t, os.Symlink(filepath.Join(dir, "nothing"), link))
	got := command(tinyWith("--export", filepath.Join(link, "x"), "--checkpoint", filepath.Join(dir, "ck"))...)
	require.Equal(t, cli.ExitBadInput, got.status, got.stderr)
	require.Contains(t, got.stderr, "spillway: --export: mkdir "+link)
	require.NotContains(t, got.stderr, "step 1")
}
