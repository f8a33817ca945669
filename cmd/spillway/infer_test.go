package main

import (
	"context"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/clitest"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/infer"
)

// trainedModel trains a small model until it knows a text, and returns the folder of its
// checkpoints.
func trainedModel(t *testing.T) (checkpoints, text string) {
	t.Helper()
	text = writeFile(t, "a.txt", strings.Repeat("the quick brown fox jumps over the lazy dog. ", 60))
	checkpoints = filepath.Join(t.TempDir(), "ck")
	got := command("train", "--model", filepath.Join(testdata, "gpt2"), "--data", text, "--steps", "40", "--batch", "4", "--seq", "32", "--lr", "1e-2", "--checkpoint", checkpoints)
	require.Equal(t, 0, got.status, got.stderr)
	return checkpoints, text
}

func TestGenerateAndEval(t *testing.T) {
	dir, text := trainedModel(t)
	newest, err := filepath.Glob(filepath.Join(dir, "step-*"))
	require.NoError(t, err)
	require.NotEmpty(t, newest)

	greedy := func(args ...string) string {
		got := command(append([]string{"generate", "--prompt", "the qu", "--tokens", "50", "--temperature", "0"}, args...)...)
		require.Equal(t, 0, got.status, got.stderr)
		require.True(t, strings.HasPrefix(got.stdout, "the qu"), got.stdout)
		require.True(t, utf8.ValidString(got.stdout))
		return got.stdout
	}
	want := greedy("--model", dir)
	require.Equal(t, want, greedy("--model", newest[len(newest)-1]), "a folder of checkpoints is its newest")
	require.Equal(t, want, greedy("--model", dir, "--ranks", "2", "--zero", "3"))
	require.Equal(t, want, greedy("--model", dir, "--ranks", "3", "--zero", "0", "--threads", "1"))

	draw := func(args ...string) string {
		got := command(append([]string{"generate", "--model", dir, "--prompt", "the", "--tokens", "40"}, args...)...)
		require.Equal(t, 0, got.status, got.stderr)
		return got.stdout
	}
	require.Equal(t, draw("--seed", "3"), draw("--seed", "3"))
	require.NotEqual(t, draw("--seed", "3"), draw("--seed", "4"))
	require.Equal(t, draw("--temperature", "0"), draw("--top-k", "1"))
	require.Equal(t, draw("--temperature", "0"), draw("--top-p", "1e-9"))

	doc := func(args ...string) (e infer.Evaluation) {
		got := command(append([]string{"eval", "--model", dir, "--data", text, "--json", "-"}, args...)...)
		require.Equal(t, 0, got.status, got.stderr)
		require.NoError(t, json.Unmarshal([]byte(got.stdout), &e))
		return e
	}
	st, err := os.Stat(text)
	require.NoError(t, err)
	one := doc("--seq", "32", "--batch", "4")
	require.EqualValues(t, st.Size()-1, one.Targets, "every target counts once")
	for _, args := range [][]string{{"--batch", "1"}, {"--batch", "7"}, {"--ranks", "3"}} {
		other := doc(append(args, "--seq", "32")...)
		require.Equal(t, one.Targets, other.Targets)
		require.InEpsilon(t, one.Loss, other.Loss, 1e-6, "%v", args)
	}
	require.InDelta(t, float64(one.Loss)/math.Ln2, one.BitsPerByte, 1e-6)
	require.Contains(t, command("eval", "--model", dir, "--data", text).stdout, "bits a byte")

	// Without --seq both use the run's 32 of 64 positions; a folder of a model does not record
	// them.
	require.Equal(t, doc("--seq", "32").Loss, doc().Loss)
	require.NotEqual(t, doc("--seq", "64").Loss, doc().Loss)
	require.Equal(t, want, greedy("--model", dir, "--seq", "32"))
	got := command("generate", "--model", dir, "--prompt", "the qu", "--tokens", "27", "--temperature", "0")
	require.Contains(t, got.stderr, "the model was trained on rows of 32 tokens: beyond them a token looks back at that many, which are computed again for it; --seq 33 looks back at all")
	require.NotContains(t, command("generate", "--model", dir, "--prompt", "the qu", "--tokens", "26").stderr, "looks back")
	folder := filepath.Join(t.TempDir(), "exported")
	require.Zero(t, command("ckpt", "export", dir, "--to", folder).status)
	require.Equal(t, doc("--seq", "64").Loss, doc("--model", folder).Loss)
	got = command("generate", "--model", dir, "--prompt", "the qu", "--tokens", "59", "--temperature", "0")
	require.Equal(t, 1, got.status)
	require.Contains(t, got.stderr, "the model's 64 positions leave 58")
}

// The text at temperature 0 follows the highest logits of a full forward pass: the model's loss on
// the text shows the likeliest token.
func TestGreedyTextIsTheLikeliest(t *testing.T) {
	dir, _ := trainedModel(t)
	got := command("generate", "--model", dir, "--prompt", "the lazy d", "--tokens", "12", "--temperature", "0")
	require.Equal(t, 0, got.status, got.stderr)
	text := strings.TrimSuffix(got.stdout, "\n")
	for at := len("the lazy d"); at < len(text); at++ {
		best, bestLoss := byte(0), math.Inf(1)
		for _, b := range []byte("abcdefghijklmnopqrstuvwxyz .") { // the text has no other bytes
			// Only the last target differs, so the least total loss is the likeliest token.
			e := lossOf(t, dir, text[:at]+string(rune(b)))
			if e < bestLoss {
				best, bestLoss = b, e
			}
		}
		require.Equal(t, string(text[at]), string(rune(best)), "after %q", text[:at])
		if at > len("the lazy d")+2 {
			break // three tokens suffice; each needs 28 evaluations
		}
	}
}

// If weights turn out damaged while they are loaded, an older checkpoint is used.
func TestInferenceTakesTheNewestWholeOne(t *testing.T) {
	dir := saved(t)
	newest := filepath.Join(dir, "step-00000002")
	m, err := checkpoint.ReadManifest(newest)
	require.NoError(t, err)
	damaged := filepath.Join(newest, clitest.RankFile)
	weights, err := os.ReadFile(damaged)
	require.NoError(t, err)
	weights[m.Files[0].Header] ^= 1 // the first extent is a parameter's
	require.NoError(t, os.WriteFile(damaged, weights, 0o644))
	text := writeFile(t, "a.txt", "some text, and some more")
	eval := func(model string) result {
		return command("eval", "--model", model, "--data", text, "--seq", "16", "--json", "-")
	}
	want := eval(filepath.Join(dir, "step-00000001"))
	require.Zero(t, want.status, want.stderr)
	got := eval(dir)
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stderr, "step-00000002 is passed over: "+damaged)
	var a, b infer.Evaluation
	require.NoError(t, json.Unmarshal([]byte(want.stdout), &a))
	require.NoError(t, json.Unmarshal([]byte(got.stdout), &b))
	a.Seconds, b.Seconds = 0, 0
	require.Equal(t, a, b)
	got = eval(newest)
	require.Equal(t, cli.ExitDoesNotFit, got.status)
	require.Contains(t, got.stderr, damaged)
}

func lossOf(t *testing.T, dir, text string) float64 {
	t.Helper()
	c := spillway.Default()
	folders, err := filepath.Glob(filepath.Join(dir, "step-*"))
	require.NoError(t, err)
	c.Model = folders[len(folders)-1]
	c.Init, c.Inference, c.Batch, c.Seq, c.Tokenizer = c.Model, true, 1, len(text)-1, "bytes"
	c.EvalData = writeFile(t, "e.txt", text)
	tr, err := spillway.New(context.Background(), c)
	require.NoError(t, err)
	defer tr.Close()
	r, err := tr.Evaluate(context.Background())
	require.NoError(t, err)
	require.EqualValues(t, len(text)-1, r.Targets)
	return float64(r.Loss)
}

func TestInferenceRefusals(t *testing.T) {
	dir := filepath.Join(testdata, "gpt2")
	text := writeFile(t, "a.txt", "some text")
	empty := t.TempDir()
	for _, c := range []struct {
		names  string
		status int
		args   []string
	}{
		{"--model is missing", 1, []string{"generate", "--prompt", "x"}},
		{"a preset has no weights", 1, []string{"generate", "--model", "gpt2", "--prompt", "x"}},
		{"neither a config.json nor a checkpoint", 1, []string{"generate", "--model", empty, "--prompt", "x"}},
		{"--prompt is missing", 1, []string{"generate", "--model", dir}},
		{"--prompt is empty", 1, []string{"generate", "--model", dir, "--prompt", ""}},
		{"--tokens 0", 1, []string{"generate", "--model", dir, "--prompt", "x", "--tokens", "0"}},
		{"--temperature -1", 1, []string{"generate", "--model", dir, "--prompt", "x", "--temperature", "-1"}},
		{"--temperature NaN", 1, []string{"generate", "--model", dir, "--prompt", "x", "--temperature", "nan"}},
		{"--top-k -1: at least 1 token is needed, or 0 to consider all", 1, []string{"generate", "--model", dir, "--prompt", "x", "--top-k", "-1"}},
		{"--top-p 1.5", 1, []string{"generate", "--model", dir, "--prompt", "x", "--top-p", "1.5"}},
		{"--top-p 0: a probability is needed, over 0", 1, []string{"generate", "--model", dir, "--prompt", "x", "--top-p", "0"}},
		{"--seq 65", 1, []string{"generate", "--model", dir, "--prompt", "x", "--seq", "65"}},
		{"--seq 0", 1, []string{"generate", "--model", dir, "--prompt", "x", "--seq", "0"}},
		{"under half", 1, []string{"generate", "--model", edited(t, "gpt2", func(c map[string]any) { c["vocab_size"] = 1000 }), "--tokenizer", "bytes", "--prompt", "x"}},
		{"the cap is 1.00 KiB", 2, []string{"generate", "--model", dir, "--prompt", "x", "--device-memory", "1KiB"}},
		{"--data is missing", 1, []string{"eval", "--model", dir}},
		{"spillway: --data: open data: no-such does not exist", 1, []string{"eval", "--model", dir, "--data", "no-such"}},
		{"which --data reads", 1, []string{"eval", "--model", dir, "--data", text, "--json", text}},
	} {
		got := command(c.args...)
		require.Equal(t, c.status, got.status, "%v: %s", c.args, got.stderr)
		require.Contains(t, got.stderr, c.names, c.args)
	}
}

// Files left out of a folder are reported with the flag that named the folder.
func TestEvalNamesItsData(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a.txt"), []byte(strings.Repeat("some text ", 50)), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "b.json"), []byte("{}"), 0o600))
	got := command("eval", "--model", testdata+"/gpt2", "--data", dir, "--seq", "16")
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stderr, "--data "+dir+": left out 1 .json\n")
	require.NotContains(t, got.stderr, "--eval-data")
}
