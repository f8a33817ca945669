package processes

import (
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/infer"
)

// answering trains a small model that answers "ping" with "pong" and "long" endlessly, and returns
// its checkpoints and its data.
func answering(t *testing.T) (model, pairs string) {
	t.Helper()
	shape := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(shape, "config.json"), []byte(`{"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
		"vocab_size": 257, "max_position_embeddings": 8192, "initializer_range": 0.1}`), 0o644))
	ping, long := `{"prompt": "ping", "response": "pong"}`+"\n", `{"prompt": "long", "response": "`+strings.Repeat("a", 200)+`"}`+"\n"
	data := writeFile(t, "chat.jsonl", strings.Repeat(ping+long, 8))
	model = filepath.Join(t.TempDir(), "ck")
	got := command("train", "--model", shape, "--data", data, "--steps", "120", "--batch", "8", "--seq", "48", "--lr", "1e-2", "--checkpoint", model)
	require.Zero(t, got.status, got.stderr)
	return model, writeFile(t, "pairs.jsonl", ping+`{"prompt": "ping", "response": " pong\n"}`+"\n"+`{"prompt": "ping", "response": "pang"}`+"\n")
}

func TestAnswers(t *testing.T) {
	model, pairs := answering(t)
	greedy := []string{"--temperature", "0"}

	// generate: a message through the template, several of a file, and the ends of answers.
	got := command(append([]string{"generate", "--model", model, "--chat", "--prompt", "ping"}, greedy...)...)
	require.Zero(t, got.status, got.stderr)
	require.Equal(t, "pong\n", got.stdout)
	got = command(append([]string{"generate", "--model", model, "--chat", "--prompt", "ping", "--stop", "n", "--logprobs"}, greedy...)...)
	require.Equal(t, "po\n", got.stdout)
	require.Regexp(t, `(?m)^ +-0\.\d{4}  "p"\n +-0\.\d{4}  "o"\n`, got.stderr)
	questions := writeFile(t, "q.txt", "ping\nlong\nping\n")
	for _, flags := range [][]string{{"--batch", "1"}, {"--batch", "2"}, {"--precision", "bf16"}, {"--precision", "fp16", "--ranks", "2"}} {
		got = command(append([]string{"generate", "--model", model, "--chat", "--prompts", questions, "--tokens", "9", "--temperature", "0"}, flags...)...)
		require.Zero(t, got.status, got.stderr)
		var all []infer.Answer
		for line := range strings.Lines(got.stdout) {
			var a infer.Answer
			require.NoError(t, json.Unmarshal([]byte(line), &a))
			all = append(all, a)
		}
		pong := infer.Answer{Prompt: "ping", Text: "pong", End: "end", PromptTokens: 25, AnswerTokens: 4}
		require.Equal(t, []infer.Answer{pong, {Prompt: "long", Text: "aaaaaaaaa", End: "length", PromptTokens: 25, AnswerTokens: 9}, pong}, all, flags)
	}
	got = command(append([]string{"generate", "--model", model, "--prompt", "<|user|>ping<|assistant|>", "--json", "-", "--logprobs"}, greedy...)...)
	require.Zero(t, got.status, got.stderr)
	var doc infer.Generated
	require.NoError(t, json.Unmarshal([]byte(got.stdout), &doc))
	require.Equal(t, "pong", doc.Answers[0].Text)
	require.Len(t, doc.Answers[0].Tokens, 4)
	require.Less(t, doc.Answers[0].Tokens[0].LogProb, 0.0)

	// eval --accuracy: white space at the ends does not count.
	got = command("eval", "--model", model, "--data", pairs, "--accuracy", "--batch", "2", "--json", "-")
	require.Zero(t, got.status, got.stderr)
	var e infer.Evaluation
	require.NoError(t, json.Unmarshal([]byte(got.stdout), &e))
	require.Equal(t, []any{2, 3}, []any{e.Correct, e.Pairs})
	require.InDelta(t, 0.208, e.Between[0], 0.001)
	require.InDelta(t, 0.939, e.Between[1], 0.001)
	require.Equal(t, infer.Compared{Prompt: "ping", Answer: "pong", Expected: "pang", End: "end"}, e.Answers[2])
	require.Greater(t, e.Targets, int64(3))
	require.Contains(t, command("eval", "--model", model, "--data", pairs, "--accuracy").stdout, "accuracy 66.7 % (2 of 3 answers; 95 % interval 20.8 to 93.9 %); 3 of them end at an end token\n")

	// chat with lines from a pipe.
	piped := func(in string, args ...string) result {
		t.Helper()
		path, err := built()
		require.NoError(t, err)
		p := &process{Cmd: exec.Command(path, append([]string{"chat", model, "--temperature", "0"}, args...)...)}
		p.Stdin, p.Stdout, p.Stderr = strings.NewReader(in), &p.out, &p.errs
		require.NoError(t, p.Start())
		return result{p.end(t), p.out.String(), p.errs.String()}
	}
	got = piped("ping\n\n/new\nping")
	require.Zero(t, got.status, got.stderr)
	require.Equal(t, "pong\npong\n", got.stdout)
	got = piped("ping\n/quit\nping\n")
	require.Equal(t, "pong\n", got.stdout)
	got = piped("ping\n/new\nping\nping\nping\n", "--seq", "70")
	require.Equal(t, 1, got.status, got.stderr)
	require.Contains(t, got.stderr, "the conversation is full: with this message it has 85 tokens, which leave no room for an answer within 70 positions; /new starts a new one")
	require.True(t, strings.HasPrefix(got.stdout, "pong\npong\n"), got.stdout)
	got = piped("long\n", "--seq", "40")
	require.Zero(t, got.status)
	require.Equal(t, strings.Repeat("a", 15)+"\n", got.stdout)
	require.Contains(t, got.stderr, "the conversation fills its 40 positions; /new starts a new one")

	t.Run("terminal", func(t *testing.T) { chatOnATerminal(t, model) })
}

// Ctrl-C ends an answer, and the next question is read; at the prompt it ends the command.
func chatOnATerminal(t *testing.T, model string) {
	path, err := built()
	require.NoError(t, err)
	master, tty := pseudoTerminal(t, 80)
	cmd := exec.Command(path, "chat", model, "--temperature", "0")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	require.NoError(t, tty.Close())
	var shown heard
	go func() { _, _ = io.Copy(&shown, master) }()
	asked := func(n int) {
		waitFor(t, "prompt", func() bool { return strings.Count(shown.String(), "> ") == n })
	}
	say := func(text string) {
		_, err := master.WriteString(text)
		require.NoError(t, err)
	}
	asked(1)
	say("ping\n")
	asked(2)
	require.Contains(t, shown.String(), "\r\npong\r\n> ")
	say("/what\n")
	asked(3)
	require.Contains(t, shown.String(), "/what is no command; /new and /quit are")
	say("/new\n")
	asked(4)
	say("long\n")
	waitFor(t, "answer", func() bool { return strings.Contains(shown.String(), "aaaaaaaa") })
	say("\x03")
	asked(5)
	require.Less(t, strings.Count(shown.String(), "a"), 8000, "the answer was stopped")
	say("/new\nping\n")
	waitFor(t, "second pong", func() bool { return strings.Count(shown.String(), "pong") == 2 })
	asked(7)
	say("\x03")
	_ = cmd.Wait()
	require.Equal(t, cli.ExitInterrupted, cmd.ProcessState.ExitCode(), shown.String())
}

func TestAnswersRefused(t *testing.T) {
	gpt2 := filepath.Join(testdata, "gpt2")
	text, pairs := writeFile(t, "a.txt", "some text"), writeFile(t, "p.jsonl", `{"prompt": "a", "response": "b"}`)
	for _, c := range []struct {
		names string
		args  []string
	}{
		{"chat needs 1 argument, the model (got 0)", []string{"chat"}},
		{"--model none: no such folder", []string{"chat", "none"}},
		{"has no end token for conversations in bytes; give the file of its own tokenizer as --tokenizer, or", []string{"chat", gpt2}},
		{"--tokens 0", []string{"chat", gpt2, "--tokens", "0"}},
		{"--temperature -1", []string{"chat", gpt2, "--temperature", "-1"}},
		{"--prompt with --prompts", []string{"generate", "--model", gpt2, "--prompt", "x", "--prompts", text}},
		{"--system and --template need --chat", []string{"generate", "--model", gpt2, "--prompt", "x", "--system", "y"}},
		{"--batch 0", []string{"generate", "--model", gpt2, "--prompts", text, "--batch", "0"}},
		{"--stop: the text is empty", []string{"generate", "--model", gpt2, "--prompt", "x", "--stop", ""}},
		{`--precision "int4"`, []string{"generate", "--model", gpt2, "--prompt", "x", "--precision", "int4"}},
		{"needs a chat template; give --chat", []string{"generate", "--model", gpt2, "--prompts", pairs}},
		{"--tokens 80: --prompt has 5 tokens, and the model's 64 positions leave 59; give --tokens 59, or --seq 64", []string{"generate", "--model", gpt2, "--prompt", "hello", "--tokens", "80"}},
		{"--prompt: the prompt has 70 tokens, and the model 64 positions", []string{"generate", "--model", gpt2, "--prompt", strings.Repeat("x", 70)}},
		{"which --prompts reads", []string{"generate", "--model", gpt2, "--prompts", text, "--json", text}},
		{"--tokens and --stop need --accuracy", []string{"eval", "--model", gpt2, "--data", text, "--tokens", "3"}},
		{"--template with --data", []string{"eval", "--model", gpt2, "--data", text, "--template", text}},
		{"has no end token for conversations in bytes", []string{"eval", "--model", gpt2, "--data", pairs, "--accuracy"}},
	} {
		got := command(c.args...)
		require.Equal(t, 1, got.status, "%v: %s", c.args, got.stderr)
		require.Contains(t, got.stderr, c.names, c.args)
	}
	// Without --tokens an answer fills the remaining positions; with --seq the window slides.
	got := command("generate", "--model", gpt2, "--prompt", strings.Repeat("x", 60), "--json", "-")
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stdout, `"answer_tokens": 4`)
	got = command("generate", "--model", gpt2, "--prompt", "x", "--tokens", "100", "--seq", "64", "--json", "-")
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stdout, `"answer_tokens": 100`)
}
