package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/clitest"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/training"
)

// smallLlama is a model of bytes, with an end token.
const smallLlama = `{"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 257, "max_position_embeddings": 64}`

// finetune explains its choices in four lines; the train command that it prints does the same.
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

// A base model of bytes learns from conversations to answer; epochs and a folder are chosen.
func TestFinetuneOnConversations(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	require.NoError(t, os.Mkdir("model", 0o755))
	require.NoError(t, os.WriteFile("model/config.json", []byte(smallLlama), 0o644))
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

// --epochs replaces the demo's steps too.
func TestEpochsOfTheDemo(t *testing.T) {
	fs, c, _ := newFlags()
	require.NoError(t, fs.Parse([]string{"--epochs=2"}))
	require.NoError(t, options.ApplyDemo(fs))
	require.False(t, fs.Changed("steps"))
	require.Equal(t, 2, c.Epochs)
}

// If a run's newest checkpoint is damaged, training continues from the one before, also with
// adapters.
func TestFinetuneTakesTheNewestWholeOne(t *testing.T) {
	t.Chdir(t.TempDir())
	require.NoError(t, os.Mkdir("model", 0o755))
	require.NoError(t, os.WriteFile("model/config.json", []byte(smallLlama), 0o644))
	require.NoError(t, os.WriteFile("text.txt", []byte(strings.Repeat("some text ", 40)), 0o644))
	run := func(args ...string) result {
		return command(append(args, "--fit=false", "--save-every", "1", "--seq", "16")...)
	}
	got := run("train", "--model", "model", "--data", "text.txt", "--steps", "2", "--checkpoint", "base")
	require.Zero(t, got.status, got.stderr)
	got = run("finetune", "base", "text.txt", "--steps", "2", "--checkpoint", "tuned")
	require.Zero(t, got.status, got.stderr)
	for _, folder := range []string{"base", "tuned"} {
		path := filepath.Join(folder, "step-00000002", clitest.RankFile)
		weights, err := os.ReadFile(path)
		require.NoError(t, err)
		weights[8+binary.LittleEndian.Uint64(weights)] ^= 1 // in a model tensor
		require.NoError(t, os.WriteFile(path, weights, 0o644))
		got = run("finetune", folder, "text.txt", "--steps", "1", "--checkpoint", "from-"+folder)
		require.Zero(t, got.status, got.stderr)
		require.Contains(t, got.stderr, "warning: "+folder+": step-00000002 is passed over")
		require.Contains(t, got.stderr, "--init "+filepath.Join(folder, "step-00000001")+" ")
	}
}

// Adapters of a checkpoint are trained on unchanged. Another rank, scale or targets, no adapters,
// and another model are rejected. The commands in the refusals work.
func TestFinetuneAgain(t *testing.T) {
	dir := t.TempDir()
	base, err := filepath.Abs(testdata + "/gpt2")
	require.NoError(t, err)
	data, err := filepath.Abs(testdata + "/text.txt")
	require.NoError(t, err)
	t.Chdir(dir)
	run := func(args ...string) result {
		return command(append(args, "--fit=false", "--steps", "1", "--seq", "16")...)
	}
	got := run("finetune", base, data, "--lora", "r=4,alpha=4,targets=*.attn.*", "--checkpoint", "tuned")
	require.Zero(t, got.status, got.stderr)
	got = run("finetune", "tuned", data, "--checkpoint", "again")
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stderr, "goes on with the adapters that the model's folder holds (--lora r=4,alpha=4,targets=*.attn.*)")
	const give = "give --lora 'r=4,alpha=4,targets=*.attn.*', or merge the adapters first: spillway ckpt export tuned/step-00000001 --merge --to DIR"
	for lora, said := range map[string]string{
		"r=4,alpha=64,targets=*.attn.*":  "its adapters have r 4 and alpha 4, and --lora has r 4 and alpha 64",
		"r=8":                            "its adapters have r 4 and alpha 4, and --lora has r 8 and alpha 16",
		"r=4,alpha=4,targets=*.c_attn.*": "its adapter of h.0.attn.c_proj is not among those of --lora, which leaves out 2",
		"r=4,alpha=4":                    "it has no adapter of h.0.mlp.c_fc, which --lora names",
		"none":                           "it holds adapters, and the run has no --lora",
	} {
		for _, model := range []string{base, "tuned"} {
			got = run("train", "--model", model, "--init", "tuned", "--data", data, "--lora", lora, "--checkpoint", "none")
			require.Equal(t, 1, got.status, lora)
			require.Contains(t, got.stderr, said)
			require.Contains(t, got.stderr, give)
		}
	}
	got = run("finetune", base, data, "--checkpoint", "tuned", "--resume")
	require.Equal(t, 1, got.status)
	require.Contains(t, got.stderr, "this run has r=16,alpha=32, whose adapters are others; give --lora 'r=4,alpha=4,targets=*.attn.*', or begin anew")
	got = run("finetune", "tuned", data, "--full", "--checkpoint", "full")
	require.Equal(t, 1, got.status)
	commands := regexp.MustCompile(`(?m)^  spillway (.*)$`).FindAllStringSubmatch(got.stderr, -1)
	require.Len(t, commands, 2, got.stderr)
	got = command(strings.Fields(commands[0][1])...)
	require.Zero(t, got.status, got.stderr)
	got = run(append(strings.Fields(commands[1][1]), "--checkpoint", "full")...)
	require.Zero(t, got.status, got.stderr)

	got = command("ckpt", "export", "tuned", "--to", "adapter", "--format", "peft")
	require.Zero(t, got.status, got.stderr)
	got = run("finetune", "adapter", data, "--checkpoint", "third")
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stderr, "goes on with the adapters that the model's folder holds (--lora r=4,alpha=4,")
	got = run("finetune", "adapter", data, "--full", "--checkpoint", "full")
	require.Equal(t, 1, got.status)
	require.Contains(t, got.stderr, "train the model beneath them:\n  spillway finetune "+base+" "+data+" --full")

	got = run("train", "--model", "tuned-merged", "--init", "tuned", "--data", data, "--lora", "r=4,alpha=4,targets=*.attn.*", "--checkpoint", "none")
	require.Equal(t, 1, got.status)
	require.Contains(t, got.stderr, "--model tuned-merged has other weights than the model of the adapters in --init tuned")
	require.Contains(t, got.stderr, "give --model tuned,")
	for _, model := range []string{base, "again", "tuned"} { // the same base
		got = run("train", "--model", model, "--init", "tuned", "--data", data, "--lora", "r=4,alpha=4,targets=*.attn.*", "--checkpoint", "none")
		require.Zero(t, got.status, got.stderr)
	}
	got = command("ckpt", "export", "tuned", "--to", "plain")
	require.Equal(t, 1, got.status)
	require.Contains(t, got.stderr, "give --merge to add them to its weights, or --format peft for the adapters alone")
}

// The lines describe the actual settings for any flags.
func TestFinetuneSaysWhatIs(t *testing.T) {
	var told strings.Builder
	args, err := training.FinetuneAsTrain(t.Context(), []string{testdata + "/gpt2", "data.jsonl", "--fit=false", "--loss-on", "all", "--packing", "off",
		"--lr-schedule", "constant", "--warmup", "0", "--lr", "1e-4", "--epochs", "1", "--checkpoint", "none"}, &told)
	require.NoError(t, err)
	require.Contains(t, args, "--fit=false")
	require.Contains(t, told.String(), "\nat a rate of 0.0001, which stays\nfor 1 epoch, in rows of 64 tokens; of conversations, one a row, every token counts (--loss-on answers counts the answers alone)\n"+
		"its states rest where --zero and --offload put them (--fit would choose), and no checkpoint is written (--checkpoint none)\n")
	told.Reset()
	_, err = training.FinetuneAsTrain(t.Context(), []string{testdata + "/gpt2", "data.jsonl", "--steps", "1", "--warmup", "1"}, &told)
	require.NoError(t, err)
	require.Contains(t, told.String(), "falling by --lr-schedule cosine after 1 step of warm-up: narrow models")
	require.Contains(t, told.String(), "for 1 step, in rows of 64 tokens; of conversations, which share rows, the answers alone count")
}

// Errors in the data, the template and the folder of checkpoints are reported before the search of
// --fit, with advice.
func TestRefusedBeforeTheSearch(t *testing.T) {
	t.Chdir(t.TempDir())
	require.NoError(t, os.Mkdir("model", 0o755))
	require.NoError(t, os.WriteFile("model/config.json", []byte(smallLlama), 0o644))
	require.NoError(t, os.WriteFile("text.txt", []byte(strings.Repeat("some text ", 40)), 0o644))
	made := command("train", "--model", "model", "--data", "text.txt", "--steps", "1", "--seq", "32", "--checkpoint", "base")
	require.Zero(t, made.status, made.stderr)
	const pair = `{"prompt": "1?", "response": "1"}` + "\n"
	for name, text := range map[string]string{
		"empty.jsonl": "", "bad.jsonl": pair + "{\n", "bot.jsonl": `{"messages": [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]}`,
		"none.jsonl": `{"messages": []}`, "long.jsonl": `{"prompt": "` + strings.Repeat("x", 99) + `", "response": "1"}`, "two.jsonl": pair + pair, "list.jsonl": "[1]",
		"good.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}", "bad.jinja": "{% for %}", "a": "",
		"count.jinja": "{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}",
	} {
		require.NoError(t, os.WriteFile(name, []byte(text), 0o644))
	}
	for _, of := range []struct {
		args []string
		said string
	}{
		{[]string{"nofile.jsonl", "--template", "good.jinja"}, "--data: open data: nofile.jsonl does not exist"},
		{[]string{"empty.jsonl", "--template", "good.jinja"}, "empty.jsonl holds no record: it is empty"},
		{[]string{"empty.jsonl"}, "empty.jsonl holds no record: it is empty"},
		{[]string{"list.jsonl"}, "list.jsonl: its first record is not a JSON object"},
		{[]string{"bad.jsonl", "--template", "good.jinja"}, "bad.jsonl:2: the record is not a JSON object: unexpected end of JSON input; correct the line, or remove it"},
		{[]string{"bot.jsonl", "--template", "good.jinja"}, `a message of role assistant (its roles are "user", "bot"; known are system, user, assistant and others that the template names); rename`},
		{[]string{"none.jsonl", "--template", "good.jinja"}, "none.jsonl:1: the conversation is empty: messages has none; remove the record"},
		{[]string{"long.jsonl", "--template", "good.jinja"}, "1 conversation, 1 cut to 64 tokens, 1 dropped without room for an answer: 0 tokens, 0 targets; give --seq above 64"},
		{[]string{"two.jsonl", "--template", "good.jinja", "--eval-split", "5%"}, "--eval-split 5% holds none of them out; give more conversations, a larger --eval-split, or --eval-data"},
		{[]string{"two.jsonl", "--template", "bad.jinja"}, "template"},
		{[]string{"two.jsonl", "--template", "nofile.jinja"}, "--template: open nofile.jinja: no such file or directory; give a file with a chat template in Jinja"},
		{[]string{"two.jsonl", "--template", "good.jinja", "--checkpoint", "a/b"}, "--checkpoint a/b"},
	} {
		got := command(append([]string{"finetune", "base", of.args[0]}, of.args[1:]...)...)
		require.Equal(t, 1, got.status, of.args)
		require.Contains(t, got.stderr, of.said)
		require.NotContains(t, got.stderr, "searching", of.args)
		require.NotContains(t, got.stderr, "recommended", of.args)
	}
	if runtime.GOOS == "linux" {
		got := command("finetune", "base", "two.jsonl", "--checkpoint", "/proc/none")
		require.Equal(t, 1, got.status)
		require.Contains(t, got.stderr, "--checkpoint /proc/none: folder /proc/ can't be written: ")
		require.NotContains(t, got.stderr, "searching")
	}
	got := command("finetune", "base", "two.jsonl", "--steps", "1", "--checkpoint", "none", "--lora", "none", "--fit=false")
	require.Zero(t, got.status, got.stderr)
	require.Regexp(t, `the same: spillway train --checkpoint none .*--lora none `, got.stderr)
	got = command("eval", "--model", "base", "--data", "long.jsonl", "--accuracy", "--seq", "16")
	require.Contains(t, got.stderr, "the model 64 positions, which leave none to generate; shorten it")
	require.NoError(t, os.WriteFile("fits.jsonl", []byte(`{"prompt": "12345", "response": "1"}`), 0o644))
	got = command("eval", "--model", "base", "--data", "fits.jsonl", "--accuracy", "--seq", "16")
	require.Equal(t, 1, got.status)
	require.Contains(t, got.stderr, "its prompt has 26 tokens, and with the answer it takes at least 27, above --seq 16; give --seq 44, or leave it out (the model has 64 positions)")
	got = command("eval", "--model", "base", "--data", "fits.jsonl", "--accuracy", "--seq", "44")
	require.Zero(t, got.status, got.stderr)
	whole := []string{"eval", "--model", "base", "--data", "fits.jsonl", "--accuracy", "--template", "count.jinja"}
	got = command(whole...)
	require.Equal(t, 1, got.status)
	require.Contains(t, got.stderr, "the answers cannot be told apart; use one with {% generation %}, or --loss-on all")
	got = command(append(whole, "--loss-on", "all")...)
	require.Zero(t, got.status, got.stderr)
	require.Regexp(t, `over 6 targets\naccuracy`, got.stdout)
	got = command("eval", "--model", "base", "--data", "text.txt", "--loss-on", "all")
	require.Equal(t, 1, got.status)
	require.Contains(t, got.stderr, "--loss-on with --data text.txt: it holds no conversations")
}

func TestFinetuneRefused(t *testing.T) {
	model, data := testdata+"/gpt2", testdata+"/text.txt"
	for said, args := range map[string][]string{
		"pairs.jsonl (got 1 argument)":                                {model},
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
