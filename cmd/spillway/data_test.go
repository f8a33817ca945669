package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/tokens"
)

func TestDataTokenizeAndInspect(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a.txt"), []byte(strings.Repeat("the quick brown fox ", 50)), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "b.jsonl"), []byte(`{"body": "jumps over the lazy dog"}`), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "c.html"), []byte("<p>"), 0o644))
	out := filepath.Join(t.TempDir(), "tokens.bin")
	got := command("data", "tokenize", "--tokenizer", "gpt2", "--out", out, "--text-field", "body", dir)
	require.Equal(t, 0, got.status, got.stderr)
	require.Contains(t, got.stdout, "tokens of 2 bytes each, of 2 files (tokenizer gpt2)")
	require.Contains(t, got.stderr, "left out: 1 .html")
	require.NotContains(t, got.stderr, "never occurs", "an end token stands between documents")
	alone := command("data", "tokenize", "--tokenizer", "gpt2", "--out", filepath.Join(t.TempDir(), "one.bin"), filepath.Join(dir, "a.txt"))
	require.Equal(t, 0, alone.status, alone.stderr)
	require.Contains(t, alone.stderr, `the end token "<|endoftext|>" (50256) never occurs`)
	got = command("data", "inspect", out, "--tokenizer", "gpt2", "--tokens", "4")
	require.Equal(t, 0, got.status, got.stderr)
	require.Contains(t, got.stdout, `"the quick brown fox"`)
	require.Contains(t, got.stdout, "raw, 2 bytes a token")
	got = command("data", "inspect", out, "--tokens", "40")
	require.Equal(t, 0, got.status, got.stderr)
	require.NotRegexp(t, `(?m) $`, got.stdout, "a line ends in a space")
	for _, line := range strings.Split(got.stdout, "\n") {
		if !strings.HasPrefix(line, out) {
			require.LessOrEqual(t, utf8.RuneCountInString(line), cli.Terminal, line)
		}
	}
	require.NotContains(t, command("data", "inspect", out, "--tokens", "0").stdout, "first:")
	got = command("data", "inspect", out, "--json", "-")
	var s tokens.TokenStats
	require.NoError(t, json.Unmarshal([]byte(got.stdout), &s))
	require.EqualValues(t, 2*s.Tokens, s.Bytes)
	require.EqualValues(t, 50256, s.Largest, "the end of text between two documents")
	model := edited(t, "gpt2", func(c map[string]any) { c["vocab_size"] = 50257 })
	got = command(tinyWith("--model", model, "--data", out, "--steps", "1")...)
	require.Equal(t, 0, got.status, "a token file needs no tokenizer: %s", got.stderr)

	for _, c := range []struct {
		names string
		args  []string
	}{
		{"--tokenizer is missing", []string{"tokenize", "--out", out, dir}},
		{"--out is missing: the token file to write, named *.bin", []string{"tokenize", "--tokenizer", "bytes", dir}},
		{"ends in .bin", []string{"tokenize", "--tokenizer", "bytes", "--out", "x.txt", dir}},
		{"name the files", []string{"tokenize", "--tokenizer", "bytes", "--out", out}},
		{"no-such", []string{"tokenize", "--tokenizer", "bytes", "--out", out + ".bin", "no-such"}},
		{"HTML", []string{"tokenize", "--tokenizer", "bytes", "--out", out + ".bin", filepath.Join(dir, "c.html")}},
		{"name one token file", []string{"inspect"}},
		{"no-such.bin", []string{"inspect", "no-such.bin"}},
		{"the file that is inspected", []string{"inspect", out, "--json", out}},
		{"beyond tokenizer bytes", []string{"inspect", out, "--tokenizer", "bytes"}},
		{"tokenize or inspect", nil},
	} {
		got := command(append([]string{"data"}, c.args...)...)
		require.Equal(t, 1, got.status, "%v: %s", c.args, got.stderr)
		require.Contains(t, got.stderr, c.names)
		require.Equal(t, 1, strings.Count(got.stderr, "\n"))
	}
}

// The default tokenizer is the model's, and one that cannot fit the model is rejected.
func TestTokenizerOfTheModel(t *testing.T) {
	text := writeFile(t, "a.txt", strings.Repeat("some text ", 100))
	small := []string{"--steps", "1", "--seq", "8", "--batch", "1"}
	run := func(args ...string) result {
		return command(append(append([]string{"train", "--data", text}, small...), args...)...)
	}

	got := run("--model", "gpt2", "--tokenizer", "bytes", "--device-memory", "100GB")
	require.Equal(t, 1, got.status, got.stderr)
	require.Contains(t, got.stderr, "--tokenizer bytes has 256 tokens, under half of the 50257 of model gpt2; leave it out for the model's own, gpt2")

	got = run("--model", filepath.Join(testdata, "gpt2"), "--tokenizer", "gpt2")
	require.Equal(t, 1, got.status)
	require.Contains(t, got.stderr, "--tokenizer gpt2 has 50257 tokens, more than the 256 of model")
	require.Equal(t, 0, run("--model", filepath.Join(testdata, "gpt2")).status, "a vocabulary of 256 is bytes")

	words := edited(t, "gpt2", func(c map[string]any) { c["vocab_size"] = 400 })
	got = run("--model", words)
	require.Equal(t, 1, got.status)
	require.Contains(t, got.stderr, "--tokenizer is missing")
	require.Contains(t, got.stderr, "400 tokens")
	require.Equal(t, 0, run("--model", words, "--tokenizer", "bytes").status)

	own, err := os.ReadFile("../../data/token/testdata/tokenizer-gpt2.json")
	require.NoError(t, err)
	words = edited(t, "gpt2", func(c map[string]any) { c["vocab_size"] = 720 })
	require.NoError(t, os.WriteFile(filepath.Join(words, "tokenizer.json"), own, 0o644))
	got = run("--model", words)
	require.Equal(t, 0, got.status, got.stderr)
}

// The config's dropout keys are ignored, and a line says so.
func TestDropoutOfTheConfigIsNoted(t *testing.T) {
	model := edited(t, "gpt2", func(c map[string]any) { c["attn_pdrop"], c["resid_pdrop"] = 0.1, 0.2 })
	got := command(tinyWith("--model", model)...)
	require.Equal(t, 0, got.status, got.stderr)
	require.Contains(t, got.stderr, "dropout of the model's config.json (attn_pdrop 0.1, resid_pdrop 0.2) is not applied: --dropout, which is 0, rules")
	require.NotContains(t, command(tinyRun...).stderr, "dropout")
	got = command("plan", "--model", model, "--dropout", "0.1")
	require.Equal(t, 0, got.status, got.stderr)
	require.Contains(t, strings.Join(strings.Fields(got.stdout), " "), "(attn_pdrop 0.1, resid_pdrop 0.2) is not applied: --dropout, which is 0.1, rules")
}

// train and plan reject unsupported config keys and name them.
func TestUnsupportedKeysOfTheConfig(t *testing.T) {
	for key, value := range map[string]any{"num_local_experts": 8, "quantization_config": map[string]any{"bits": 4}, "attn_logit_softcapping": 50} {
		model := edited(t, "llama-tied", func(c map[string]any) { c[key] = value })
		for _, args := range [][]string{tinyWith("--model", model), {"plan", "--model", model}} {
			got := command(args...)
			require.Equal(t, 1, got.status, got.stderr)
			require.Contains(t, got.stderr, key)
		}
	}
}

func TestJSONLinesNeedTheirField(t *testing.T) {
	lines := writeFile(t, "a.jsonl", strings.Repeat(`{"text": "the quick brown fox"}`+"\n", 20))
	got := command(tinyWith("--data", lines)...)
	require.Equal(t, 1, got.status)
	require.Contains(t, got.stderr, "--text-field text")
	require.Equal(t, 0, command(tinyWith("--data", lines, "--text-field", "text")...).status)
}
