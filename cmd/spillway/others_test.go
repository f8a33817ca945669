package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/clitest"
)

// A file that is no output of the same kind is not changed.
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
		{strings.Join(tinyWith("--trace", notes), "\n"), "--trace \"" + notes + "\" is there already and holds no trace"},
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

	metrics, trace := filepath.Join(dir, "m.jsonl"), filepath.Join(dir, "t.json")
	require.NoError(t, os.WriteFile(trace, nil, 0o644))
	for range 2 {
		require.Equal(t, 0, command(tinyWith("--metrics", metrics, "--trace", trace)...).status, "an earlier run's files are written anew")
	}
	require.Equal(t, 0, command("data", "tokenize", "--replace", "--tokenizer", "bytes", "--out", tokens, text).status)
}

// A run whose checkpoints are in its data's folder reads the same data when it continues; other
// outputs must not be there.
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

// No command writes into the checkpoints that it reads or makes, by any form of their path.
func TestOutputsAmongCheckpoints(t *testing.T) {
	dir := t.TempDir()
	ck, export := filepath.Join(dir, "ck"), filepath.Join(dir, "export")
	require.Zero(t, command(tinyWith("--checkpoint", ck)...).status)
	one := filepath.Join(ck, checkpoint.Name(2, 1))
	weights, manifest, later := filepath.Join(one, clitest.RankFile), filepath.Join(one, "manifest.json"), filepath.Join(ck, checkpoint.Name(6, 1))
	marks := filepath.Join(ck, ".spillway-marks")
	link := filepath.Join(dir, "link")
	require.NoError(t, os.Symlink(manifest, link))
	before := tree(t, dir)
	text := testdata + "/text.bin"
	for _, folder := range []string{ck, one} {
		for _, out := range []string{weights, manifest, filepath.Join(one, "new"), marks, later} {
			for _, args := range [][]string{
				{"eval", "--model", folder, "--data", text, "--json", out},
				{"generate", "--model", folder, "--prompt", "x", "--json", out},
				{"plan", "--model", folder, "--json", out},
				{"plan", "--model", folder, "--html", out},
				tinyWith("--init", folder, "--trace", out),
				{"train", "--model", folder, "--data", text, "--seq", "16", "--metrics", out},
				{"finetune", folder, text, "--seq", "16", "--checkpoint", export, "--receipt", out},
				{"bench", "zero", "--model", folder, "--data", text, "--seq", "16", "--calibrate=false", "--json", out},
				{"bench", "scale", "--model", testdata + "/gpt2", "--init", folder, "--data", text, "--seq", "16", "--calibrate=false", "--json", out},
				{"ckpt", "inspect", folder, "--json", out},
			} {
				got := command(args...)
				require.Equal(t, cli.ExitBadInput, got.status, "%v: %s", args, got.stderr)
				require.Regexp(t, `would lie|would overwrite|holds no metrics|holds no receipt`, got.stderr, args)
			}
		}
		require.Equal(t, cli.ExitBadInput, command("ckpt", "inspect", folder, "--json", link).status)
		require.Equal(t, cli.ExitBadInput, command("ckpt", "export", folder, "--to", later).status)
		require.Equal(t, cli.ExitBadInput, command("plan", "--model", folder, "--dump", later).status)
	}
	for _, flag := range []string{"--metrics", "--trace", "--receipt", "--tensorboard", "--disk"} {
		for _, out := range []string{later, filepath.Join(later, "manifest.json"), marks} {
			got := command(tinyWith("--checkpoint", ck, "--resume", "--steps", "6", flag, out)...)
			require.Equal(t, cli.ExitBadInput, got.status, "%s %s: %s", flag, out, got.stderr)
			require.Contains(t, got.stderr, flag+` "`+out)
			if out != marks || flag != "--metrics" && flag != "--receipt" { // the marks hold no metrics and no receipt, a different error
				require.Contains(t, got.stderr, "would lie among the checkpoints of --checkpoint")
			}
		}
	}
	require.Equal(t, before, tree(t, dir))
	got := command(tinyWith("--checkpoint", ck, "--resume", "--steps", "6", "--metrics", filepath.Join(ck, "metrics.jsonl"))...)
	require.Zero(t, got.status, "as docs/start.md has it: %s", got.stderr)
	require.Zero(t, command("ckpt", "verify", ck).status)
}

// Links to the same missing file count as one output.
func TestOutputsThroughLinksToNothing(t *testing.T) {
	dir := t.TempDir()
	one, two := filepath.Join(dir, "one"), filepath.Join(dir, "two")
	require.NoError(t, os.Symlink("file", one))
	require.NoError(t, os.Symlink("file", two))
	got := command(tinyWith("--metrics", one, "--trace", two)...)
	require.Equal(t, cli.ExitBadInput, got.status, got.stderr)
	require.Contains(t, got.stderr, "is the file of --metrics too")
	require.Zero(t, command(tinyWith("--metrics", one)...).status)
	require.FileExists(t, filepath.Join(dir, "file"))
}

func TestEmptyPaths(t *testing.T) {
	for _, flag := range []string{"--checkpoint", "--metrics", "--data", "--eval-data"} {
		got := command(tinyWith(flag, "")...)
		require.Equal(t, 1, got.status)
		require.Contains(t, got.stderr, "the path is empty; leave the flag out for none")
	}
}
