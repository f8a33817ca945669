package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
)

func TestMain(m *testing.M) { os.Exit(ownworld.Run(m)) }

// The questions' prompts are in no story and no pair, and other seeds ask others.
func TestQuestionsAreNew(t *testing.T) {
	read := func(folder, name string) string {
		text, err := os.ReadFile(filepath.Join(folder, name))
		require.NoError(t, err)
		return string(text)
	}
	var last string
	for seed := range uint64(3) {
		folder := t.TempDir()
		require.NoError(t, write(folder, amounts{stories: 2000, pairs: 500, questions: 10, seed: seed}))
		trained := read(folder, "stories.txt") + read(folder, "pairs.jsonl")
		asked := read(folder, "questions.jsonl")
		require.NotEqual(t, last, asked)
		last = asked
		for line := range strings.Lines(asked) {
			var p pair
			require.NoError(t, json.Unmarshal([]byte(line), &p))
			scene, question, ok := strings.Cut(p.Prompt, ". ")
			require.True(t, ok)
			require.NotContains(t, trained, scene)
			require.Contains(t, trained, question)
			require.Regexp(t, form, p.Response)
		}
	}
}

// answer is what eval writes of one.
type answer struct{ Answer, Expected, End string }

// form is that of the responses.
var form = regexp.MustCompile(`^(It is [a-z ]+|[A-Z][a-z]+ has it)\.$`)

// The tutorial's commands make a model whose answers end, which its base's do not. The short form
// has too few steps for right answers. The long one is the tutorial, whose questions are drawn by
// five seeds.
func TestTheTutorial(t *testing.T) {
	if testing.Short() {
		t.Skip("trains models")
	}
	dir := t.TempDir()
	world, spillway := filepath.Join(dir, "world"), filepath.Join(dir, "spillway")
	run := func(args ...string) string {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput()
		require.NoError(t, err, "%s\n%s", args, out)
		return string(out)
	}
	run("go", "build", "-ldflags=-w", "-o", spillway, "../../cmd/spillway")
	made := long.Or(amounts{stories: 400, steps: 10, pairs: 200, questions: 10}, standard)
	require.NoError(t, build(t.Context(), world, made))
	run(spillway, "finetune", filepath.Join(world, "base"), filepath.Join(world, "pairs.jsonl"), "--checkpoint", filepath.Join(world, "tuned"))
	for seed := range long.Of(1, 2, 5) {
		made.seed = uint64(seed + 1)
		require.NoError(t, write(world, made))
		asked := func(model string) []answer {
			t.Helper()
			file := filepath.Join(dir, "answers.json")
			run(spillway, "eval", "--model", filepath.Join(world, model),
				"--data", filepath.Join(world, "questions.jsonl"), "--accuracy", "--json", file)
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			var all struct{ Answers []answer }
			require.NoError(t, json.Unmarshal(text, &all))
			require.Len(t, all.Answers, 10)
			return all.Answers
		}
		right := 0
		for _, a := range asked("tuned") {
			require.Equal(t, "end", a.End, a)
			if a.Answer == a.Expected {
				right++
			}
			if long.On() {
				require.Regexp(t, form, a.Answer)
			}
		}
		if long.On() {
			require.GreaterOrEqual(t, right, 9, "seed %d", made.seed)
		}
		for _, a := range asked("base") {
			require.NotEqual(t, "end", a.End, "%v: the base model was not to answer: the check finds nothing", a)
		}
	}
}
