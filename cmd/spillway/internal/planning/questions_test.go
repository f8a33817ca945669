package planning_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// The page of questions has the output of the commands. The test runs a sample, and all if long.On
// or with -update, which writes the answers.
func TestQuestions(t *testing.T) {
	path := filepath.Join("..", "..", "..", "..", "docs", "questions.md")
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	const start = "```console\n$ spillway "
	parts := strings.Split(string(text), start)
	require.Len(t, parts, 21, "twenty questions")
	type block struct{ command, answer, rest string }
	var blocks []*block
	for _, p := range parts[1:] {
		inside, rest, ok := strings.Cut(p, "```\n")
		require.True(t, ok)
		line, answer, _ := strings.Cut(inside, "\n")
		blocks = append(blocks, &block{line, answer, rest})
	}
	if *update {
		page := parts[0]
		for _, b := range blocks {
			b.answer = answerOf(t, b.command)
			page += start + b.command + "\n" + b.answer + "```\n" + b.rest
		}
		require.NoError(t, os.WriteFile(path, []byte(page), 0o644))
	}
	for _, b := range long.Sample(20, 2, blocks) {
		require.Equal(t, b.answer, answerOf(t, b.command), "docs/questions.md: %s", b.command)
	}
}

// predicted matches a line with a step's time, which on a CPU depends on the machine.
var predicted = regexp.MustCompile(`(?m)^  .* s a step and .* tokens/s by prediction$`)

// answerOf returns the answer that a command prints before its plan, without a CPU's times.
func answerOf(t *testing.T, line string) string {
	r := command(words(line)...)
	require.Equal(t, 0, r.status, "%s: %s", line, r.stderr)
	answer, _, ok := strings.Cut(r.stdout, "\n\n")
	require.True(t, ok, r.stdout)
	if !strings.Contains(line, "--gpu ") {
		require.Regexp(t, predicted, answer)
		answer = predicted.ReplaceAllString(answer, "  … s a step and … tokens/s by prediction")
	}
	return answer + "\n"
}

// If --effort is used up before an answer, the error says so, even if no plan was evaluated for a
// value, and names an effort that suffices.
func TestAnEffortThatDoesNotAnswer(t *testing.T) {
	job := "plan --model " + testdata + "/gpt2 --device-memory 1200KiB --ask "
	for _, ask := range []string{"seq", "gpus", "batch"} {
		for _, effort := range []string{"1", "2", "3"} {
			r := command(strings.Fields(job + ask + " --effort " + effort)...)
			require.Equal(t, "spillway: --effort "+effort+": the plans were used up before --ask "+ask+
				" was answered; leave it out, or give --effort 1000\n", r.stderr)
		}
		r := command(strings.Fields(job + ask + " --effort 1000")...)
		require.NotContains(t, r.stderr, "used up")
	}
}
