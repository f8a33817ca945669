package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What a file holds that is no output of the same kind stays as it is.
func TestFilesOfOthersStay(t *testing.T) {
	dir := t.TempDir()
	notes := filepath.Join(dir, "notes")
	require.NoError(t, os.WriteFile(notes, []byte("my notes\n"), 0o644))
	tokens := filepath.Join(dir, "tokens.bin")
	require.NoError(t, os.WriteFile(tokens, []byte("theirs"), 0o644))
	text := writeFile(t, "a.txt", "some text")
	ck := filepath.Join(dir, "ck")
	require.Equal(t, 0, command(tinyWith("--checkpoint", ck)...).status)
	for _, c := range []struct{ args, want string }{
		{strings.Join(tinyWith("--metrics", notes), "\n"), "is there already and holds no metrics"},
		{strings.Join(tinyWith("--metrics", notes, "--checkpoint", ck, "--steps", "4", "--resume"), "\n"), "is there already and holds no metrics"},
		{"data\ntokenize\n--tokenizer\nbytes\n--out\n" + tokens + "\n" + text, "is there already; give another name, or --replace"},
	} {
		got := command(strings.Split(c.args, "\n")...)
		require.Equal(t, 1, got.status, c.args)
		require.Contains(t, got.stderr, c.want)
	}
	b, err := os.ReadFile(notes)
	require.NoError(t, err)
	require.Equal(t, "my notes\n", string(b))
	b, err = os.ReadFile(tokens)
	require.NoError(t, err)
	require.Equal(t, "theirs", string(b))

	metrics := filepath.Join(dir, "m.jsonl")
	for range 2 {
		require.Equal(t, 0, command(tinyWith("--metrics", metrics)...).status, "an earlier run's metrics are written anew")
	}
	require.Equal(t, 0, command("data", "tokenize", "--replace", "--tokenizer", "bytes", "--out", tokens, text).status)
}

// A run whose checkpoints lie in its data's folder reads the same data when it goes
// on; other outputs can't lie there.
func TestOutputsAmongTheData(t *testing.T) {
	corpus := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(corpus, "a.txt"), []byte(strings.Repeat("some text ", 100)), 0o644))
	args := []string{"train", "--model", testdata + "/gpt2", "--data", corpus, "--seq", "8", "--batch", "1", "--checkpoint", corpus}
	require.Equal(t, 0, command(append(args, "--steps", "2")...).status)
	got := command(append(args, "--steps", "4", "--resume")...)
	require.Equal(t, 0, got.status, got.stderr)
	got = command(append(args, "--steps", "6", "--resume", "--metrics", filepath.Join(corpus, "runs", "m.jsonl"))...)
	require.Equal(t, 1, got.status)
	require.Contains(t, got.stderr, "which --data reads; give a file outside it")
}

func TestEmptyPaths(t *testing.T) {
	for _, flag := range []string{"--checkpoint", "--metrics", "--data", "--eval-data"} {
		got := command(tinyWith(flag, "")...)
		require.Equal(t, 1, got.status)
		require.Contains(t, got.stderr, "the path is empty; leave the flag out for none")
	}
}
