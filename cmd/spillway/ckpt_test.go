package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/ckpt"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/clitest"
)

// clitest.RankFile is the file of the only rank.
func TestCkptVerify(t *testing.T) {
	dir := saved(t)
	one, two := filepath.Join(dir, "step-00000001"), filepath.Join(dir, "step-00000002")
	for _, d := range []string{dir, one, one + "/"} {
		got := command("ckpt", "verify", d)
		require.Zero(t, got.status, got.stderr)
		require.Contains(t, got.stdout, "step-00000001: whole, step 1, 5 files, ")
	}
	entries, err := os.ReadDir(two)
	require.NoError(t, err)
	require.Len(t, entries, 6)
	for _, e := range entries {
		path := filepath.Join(two, e.Name())
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		bad := append([]byte(nil), text...)
		bad[len(bad)/2] ^= 1
		require.NoError(t, os.WriteFile(path, bad, 0o644))
		for _, d := range []string{dir, two} {
			got := command("ckpt", "verify", d)
			require.Equal(t, cli.ExitDoesNotFit, got.status, path)
			require.Contains(t, got.stderr, path)
			require.Contains(t, got.stdout, path)
			require.Equal(t, d == dir, strings.Contains(got.stdout, "step-00000001: whole"), "the others are verified too")
		}
		require.NoError(t, os.WriteFile(path, text, 0o644))
	}
	require.NoError(t, os.WriteFile(filepath.Join(two, "added.safetensors"), nil, 0o644))
	got := command("ckpt", "verify", dir)
	require.Equal(t, cli.ExitDoesNotFit, got.status)
	require.Contains(t, got.stderr, "added")
	require.NoError(t, os.Remove(filepath.Join(two, "added.safetensors")))

	marks := filepath.Join(dir, ".spillway-marks")
	text, err := os.ReadFile(marks)
	require.NoError(t, err)
	text[3] ^= 1
	require.NoError(t, os.WriteFile(marks, text, 0o644))
	got = command("ckpt", "verify", dir)
	require.Equal(t, cli.ExitDoesNotFit, got.status)
	require.Contains(t, got.stderr, marks+": line 1")
}

func TestCkptRefusesWhatIsNone(t *testing.T) {
	for _, verb := range []string{"inspect", "verify", "export", "reshard"} {
		for _, dir := range []string{"no/such", t.TempDir(), testdata + "/gpt2", testdata + "/text.txt"} {
			args := []string{"ckpt", verb, dir}
			if verb == "export" {
				args = append(args, "--to", filepath.Join(t.TempDir(), "x"))
			}
			if verb == "reshard" {
				args = append(args, "--ranks", "2")
			}
			got := command(args...)
			require.Equal(t, cli.ExitBadInput, got.status, args)
			require.NotEmpty(t, got.stderr)
		}
		require.Equal(t, cli.ExitBadInput, command("ckpt", verb).status)
		require.Equal(t, cli.ExitBadInput, command("ckpt", verb, "a", "b").status)
	}
	got := command("ckpt")
	require.Equal(t, cli.ExitBadInput, got.status)
	require.Contains(t, got.stderr, "inspect, verify, export or reshard")
}

func TestCkptInspect(t *testing.T) {
	dir := saved(t)
	before := tree(t, dir)
	got := command("ckpt", "inspect", dir)
	require.Zero(t, got.status, got.stderr)
	require.Regexp(t, `step-00000001 .* confirmed\n`, got.stdout)
	require.Regexp(t, `step-00000002 .* not confirmed yet \(no update followed it\)\n`, got.stdout)
	require.Contains(t, got.stdout, "optimizer adamw, 2 samples seen of data of ")
	require.Contains(t, got.stdout, `--lr "0.001"`)
	require.Contains(t, got.stdout, clitest.RankFile)
	require.Regexp(t, `exp_avg_sq +28 `, got.stdout)

	require.NoError(t, os.Truncate(filepath.Join(dir, "step-00000001", "manifest.json"), 3))
	got = command("ckpt", "inspect", dir, "--json", "-")
	require.Zero(t, got.status, got.stderr)
	var doc struct{ Checkpoints []ckpt.Inspected }
	require.NoError(t, json.Unmarshal([]byte(got.stdout), &doc))
	require.Len(t, doc.Checkpoints, 2)
	require.Contains(t, doc.Checkpoints[0].Damage, "manifest.json")
	require.Equal(t, 2, doc.Checkpoints[1].Step)
	require.Len(t, doc.Checkpoints[1].Run, 32)
	require.Len(t, doc.Checkpoints[1].Files, 5)
	require.Len(t, doc.Checkpoints[1].States, 3)
	for _, f := range doc.Checkpoints[1].Files {
		require.Equal(t, strings.HasSuffix(f.Name, ".safetensors"), f.Tensors > 0)
	}
	got = command("ckpt", "inspect", filepath.Join(dir, "step-00000002"))
	require.Zero(t, got.status, got.stderr)
	require.NotContains(t, got.stdout, "step-00000001")
	got = command("ckpt", "inspect", dir, "--json", filepath.Join(dir, "step-00000002", "manifest.json"))
	require.Equal(t, cli.ExitBadInput, got.status)
	delete(before, filepath.Join(dir, "step-00000001", "manifest.json"))
	now := tree(t, dir)
	delete(now, filepath.Join(dir, "step-00000001", "manifest.json"))
	require.Equal(t, before, now, "inspecting changes nothing")
}

// The exported model has the run's final parameters, and loads as a model.
func TestCkptExport(t *testing.T) {
	dir := saved(t)
	to := filepath.Join(t.TempDir(), "new", "model")
	got := command("ckpt", "export", dir, "--to", to)
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stdout, "step-00000002")
	entries, err := os.ReadDir(to)
	require.NoError(t, err)
	require.Len(t, entries, 5, "the config, the weights, and three files for the tokenizer")
	around, err := os.ReadDir(filepath.Dir(to))
	require.NoError(t, err)
	require.Len(t, around, 1, "no remains")
	for _, name := range []string{"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"} {
		want, err := os.ReadFile(filepath.Join(dir, "step-00000002", name))
		require.NoError(t, err)
		have, err := os.ReadFile(filepath.Join(to, name))
		require.NoError(t, err)
		require.Equal(t, want, have)
	}
	whole := command(tinyWith("--checkpoint", dir, "--resume")...)
	loaded := command("train", "--model", to, "--init", to, "--data", testdata+"/text.bin", "--steps", "1", "--batch", "1", "--seq", "16", "--lr", "0", "--weight-decay", "0")
	require.Zero(t, loaded.status, loaded.stderr)
	require.Equal(t, shaOf(t, whole.stdout), shaOf(t, loaded.stdout))

	got = command("ckpt", "export", dir, "--to", to)
	require.Equal(t, cli.ExitBadInput, got.status)
	require.Contains(t, got.stderr, "not empty")
	for _, inside := range []string{filepath.Join(dir, "x"), filepath.Join(dir, "step-00000002", "x"), dir} {
		got = command("ckpt", "export", dir, "--to", inside)
		require.Equal(t, cli.ExitBadInput, got.status, inside)
	}
	empty := t.TempDir()
	require.NoError(t, os.Truncate(filepath.Join(dir, "step-00000002", clitest.RankFile), 8))
	got = command("ckpt", "export", dir, "--to", empty)
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stderr, "step-00000002 is passed over")
	require.Contains(t, got.stdout, "step-00000001")
	require.Equal(t, cli.ExitDoesNotFit, command("ckpt", "export", filepath.Join(dir, "step-00000002"), "--to", filepath.Join(empty, "y")).status)
	require.NoDirExists(t, filepath.Join(empty, "y"))
	require.Equal(t, cli.ExitBadInput, command("ckpt", "export", dir).status)
}

// Weights above --max-shard-size become several files and an index that loads.
func TestCkptExportSharded(t *testing.T) {
	dir := saved(t)
	to := filepath.Join(t.TempDir(), "model")
	got := command("ckpt", "export", dir, "--to", to, "--max-shard-size", "50000")
	require.Zero(t, got.status, got.stderr)
	require.NoFileExists(t, filepath.Join(to, "model.safetensors"))
	parts, err := filepath.Glob(filepath.Join(to, "model-0000*-of-0000*.safetensors"))
	require.NoError(t, err)
	require.Greater(t, len(parts), 1)
	for _, p := range parts {
		st, err := os.Stat(p)
		require.NoError(t, err)
		require.Less(t, st.Size(), int64(55000), "tensors of up to 50,000 bytes and a header")
	}
	whole := command(tinyWith("--checkpoint", dir, "--resume")...)
	loaded := command("train", "--model", to, "--init", to, "--data", testdata+"/text.bin", "--steps", "1", "--batch", "1", "--seq", "16", "--lr", "0", "--weight-decay", "0")
	require.Zero(t, loaded.status, loaded.stderr)
	require.Equal(t, shaOf(t, whole.stdout), shaOf(t, loaded.stdout))
	require.Zero(t, command("generate", "--model", to, "--prompt", "a", "--tokens", "2").status)
}

// Files for another number of ranks hold the same states, under the same name.
func TestCkptReshard(t *testing.T) {
	dir := saved(t)
	before := command("ckpt", "inspect", dir)
	got := command("ckpt", "reshard", dir, "--ranks", "3")
	require.Zero(t, got.status, got.stderr)
	last := filepath.Join(dir, "step-00000002")
	require.Contains(t, got.stdout, last+": 3 rank files")
	require.NoFileExists(t, filepath.Join(last, clitest.RankFile))
	require.FileExists(t, filepath.Join(last, "rank-00002-of-00003.safetensors"))
	require.Zero(t, command("ckpt", "verify", dir).status)
	require.Regexp(t, `exp_avg_sq +28 `, command("ckpt", "inspect", dir).stdout)
	require.Contains(t, before.stdout, "not confirmed yet")
	require.Contains(t, command("ckpt", "reshard", dir).stderr, "--ranks N is missing")
	for _, ranks := range []string{"0", "-1", "99999999"} {
		require.Equal(t, cli.ExitBadInput, command("ckpt", "reshard", dir, "--ranks", ranks).status)
	}
	whole := command(tinyWith("--steps", "4")...)
	resumed := command(tinyWith("--steps", "4", "--checkpoint", dir, "--resume")...)
	require.Zero(t, resumed.status, resumed.stderr)
	require.Equal(t, shaOf(t, whole.stdout), shaOf(t, resumed.stdout))
}
