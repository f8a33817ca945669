package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
)

// finetune says in four lines what it chooses; the train command that it prints does the same.
func TestFinetune(t *testing.T) {
	dir := t.TempDir()
	one, two := filepath.Join(dir, "one"), filepath.Join(dir, "two")
	for _, more := range [][]string{nil, {"--full", "--lr", "1e-3"}} {
		got := command(append([]string{"finetune", testdata + "/gpt2", testdata + "/text.txt", "--steps", "3", "--seq", "16", "--checkpoint", one}, more...)...)
		require.Zero(t, got.status, got.stderr)
		lines := strings.Split(got.stderr, "\n")
		require.Contains(t, lines[0], map[bool]string{true: "trains adapters (--lora r=16", false: "trains all parameters"}[more == nil])
		require.Contains(t, lines[1], map[bool]string{true: "at a rate of 0.005, falling by --lr-schedule cosine", false: "at a rate of 0.001, "}[more == nil])
		require.Contains(t, lines[2], "for 3 steps, in rows of 16 tokens")
		require.Contains(t, lines[3], "--fit chooses")
		same, ok := strings.CutPrefix(lines[4], "the same: spillway ")
		require.True(t, ok, lines[4])
		again := command(strings.Fields(strings.Replace(same, one, two, 1))...)
		require.Zero(t, again.status, again.stderr)
		sum := regexp.MustCompile(`[0-9a-f]{64}`)
		require.NotEmpty(t, sum.FindString(got.stdout))
		require.Equal(t, sum.FindString(got.stdout), sum.FindString(again.stdout))
		require.NoError(t, os.RemoveAll(one))
		require.NoError(t, os.RemoveAll(two))
	}
}

// A base model in bytes learns from conversations to answer; epochs and a folder are chosen.
func TestFinetuneOnConversations(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	require.NoError(t, os.Mkdir("model", 0o755))
	require.NoError(t, os.WriteFile("model/config.json", []byte(`{"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 257, "max_position_embeddings": 64}`), 0o644))
	var text strings.Builder
	for i := range 40 {
		fmt.Fprintf(&text, `{"prompt": "%d?", "response": "%d"}`+"\n", i, i)
	}
	require.NoError(t, os.WriteFile("pairs.jsonl", []byte(text.String()), 0o644))
	require.NoError(t, os.WriteFile("text.txt", []byte(text.String()), 0o644))
	got := command("train", "--model", "model", "--data", "text.txt", "--steps", "2", "--seq", "32", "--checkpoint", "base")
	require.Zero(t, got.status, got.stderr)
	got = command("finetune", "base", "pairs.jsonl")
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stderr, "--model base/step-00000002", "whose tokenizer it takes")
	require.Contains(t, got.stderr, "for 3 epochs, in rows of 64 tokens")
	require.Regexp(t, `40 conversations, .* in \d+ packed rows of 64`, got.stderr)
	require.Regexp(t, `3 epochs of \d+ rows, 4 a step: \d+ steps`, got.stderr)
	got = command("generate", "--model", "base-finetuned", "--prompt", "<|user|>1?<|assistant|>", "--tokens", "3", "--temperature", "0")
	require.Zero(t, got.status, got.stderr)
}

// --epochs takes the place of the demo's steps too.
func TestEpochsOfTheDemo(t *testing.T) {
	fs, c, _ := newFlags()
	require.NoError(t, fs.Parse([]string{"--epochs=2"}))
	require.NoError(t, options.ApplyDemo(fs))
	require.False(t, fs.Changed("steps"))
	require.Equal(t, 2, c.Epochs)
}

func TestFinetuneRefused(t *testing.T) {
	model, data := testdata+"/gpt2", testdata+"/text.txt"
	for said, args := range map[string][]string{
		"finetune takes a model's folder and a data path":             {model},
		"finetune nowhere: no such folder":                            {"nowhere", data},
		"finetune gpt2: no such folder":                               {"gpt2", data},
		"--data with finetune: the model and the data are":            {model, data, "--data", data},
		"--full with --lora: all parameters are trained, or adapters": {model, data, "--full", "--lora", "r=4"},
		"--epochs 2 with --steps 3: each says how long the run is":    {model, data, "--epochs", "2", "--steps", "3"},
	} {
		got := command(append([]string{"finetune"}, args...)...)
		require.Equal(t, 1, got.status, said)
		require.Contains(t, got.stderr, said)
	}
}
