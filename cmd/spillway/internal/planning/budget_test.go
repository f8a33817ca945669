package planning_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/planning"
)

// --tokens and --price give the recommended plan's time, GPU-hours and cost.
func TestBudget(t *testing.T) {
	args := strings.Fields("plan --effort 20 --model gpt2 --gpu h100-80 --nodes 1 --gpus-per-node 8 --precision bf16 --seq 1024 --batch 8 --tokens 100e9 --price 2.5 --json -")
	r := command(args...)
	require.Zero(t, r.status, r.stderr)
	var doc planning.Doc
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &doc))
	step := doc.Recommended.Plan.StepSeconds * doc.Time.Low
	days := 100e9 / (8 * 8 * 1024) * step / 86400
	require.InEpsilon(t, days, doc.Budget.Days[0], 1e-9)
	require.InEpsilon(t, days*24*8, doc.Budget.RankHours[0], 1e-9)
	require.InEpsilon(t, days*24*8*2.5, doc.Budget.Cost[0], 1e-9)
	require.Greater(t, doc.Budget.Days[1], doc.Budget.Days[0])
	text := unwrapped(command(args[:len(args)-2]...).stdout)
	require.Regexp(t, `100 billion tokens take [\d.,]+–[\d.,]+ days and [\d,]+–[\d,]+ GPU-hours, which cost [\d,]+–[\d,]+ at --price 2.5`, text)
	text = command(strings.Fields("plan --effort 1 --model gpt2 --gpu t4-16 --tokens 1e30 --price 1")...).stdout
	require.Regexp(t, `1e\+18 trillion tokens take \S+e\+\d+ days and \S+e\+\d+ GPU-hours, which cost \S+e\+\d+ at --price 1`, unwrapped(text))
	require.Contains(t, command("plan", "--model", "gpt2", "--price", "2").stderr, "give --tokens too")
	require.Contains(t, command("plan", "--model", "gpt2", "--tokens", "-1").stderr, "--tokens -1")
	require.Contains(t, command("plan", "--model", "gpt2", "--tokens", "1e-5").stderr, "--tokens 1e-05")
	text = command(strings.Fields("plan --effort 1 --model gpt2 --gpu t4-16 --tokens 1")...).stdout
	require.Contains(t, text, "1 token takes ")
}

// JSON, the page and the text have the budget of one plan: the recommended one, or the request if
// nothing fits.
func TestBudgetOfWhatFits(t *testing.T) {
	for _, c := range []struct {
		args   string
		status int
	}{
		{"--model llama-3-8b --gpu rtx-4090 --precision bf16 --effort 60", cli.ExitDoesNotFit}, // a way out
		{"--model gpt2 --gpu t4-16 --effort 1", cli.ExitDone},                                  // nothing else was planned
		{"--model " + testdata + "/gpt2 --seq 16 --device-memory 10KB", cli.ExitDoesNotFit},    // nothing fits
	} {
		file, page := filepath.Join(t.TempDir(), "p.json"), filepath.Join(t.TempDir(), "p.html")
		args := append(strings.Fields("plan --tokens 1e9 --price 0.4 --json "+file+" --html "+page), strings.Fields(c.args)...)
		r := command(args...)
		require.Equal(t, c.status, r.status, r.stderr)
		var doc planning.Doc
		written, err := os.ReadFile(file)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(written, &doc))
		answered := doc.Requested
		require.Equal(t, doc.Run != "", doc.Recommended != nil)
		if doc.Recommended != nil {
			answered = doc.Recommended.Plan
			require.True(t, answered.Fits)
		}
		if len(doc.Ways) > 0 {
			require.Equal(t, doc.Ways[0].Flags, doc.Recommended.Flags)
		}
		require.Equal(t, answered.TokensPerSecond, doc.TokensPerSecond)
		require.InEpsilon(t, 1e9/answered.TokensPerSecond.High/86400, doc.Budget.Days[0], 1e-9)
		line := regexp.MustCompile(`1 billion tokens take .* which cost (\S+) at --price 0.4`).FindStringSubmatch(unwrapped(r.stdout))
		require.NotNil(t, line, r.stdout)
		low, _, _ := strings.Cut(strings.ReplaceAll(line[1], ",", ""), "–")
		cost, err := strconv.ParseFloat(low, 64)
		require.NoError(t, err)
		require.InEpsilon(t, doc.Budget.Cost[0], cost, 0.06) // two digits
		html, err := os.ReadFile(page)
		require.NoError(t, err)
		require.Contains(t, string(html), "which cost "+line[1]+" at")
	}
}

// A plan is for a GPU or for the CPU: --gpu conflicts with --device CPU. With --from, --gpu
// overrides the device in the plan's file.
func TestGPUOrCPU(t *testing.T) {
	args := strings.Fields("plan --effort 1 --model gpt2 --gpu t4-16")
	r := command(append(args, "--device", "CPU")...)
	require.Equal(t, cli.ExitBadInput, r.status)
	require.Contains(t, r.stderr, "--device CPU with --gpu t4-16")
	require.Zero(t, command(append(args, "--device", "cuda")...).status)
	file := filepath.Join(t.TempDir(), "p.json")
	require.Zero(t, command(strings.Fields("plan --effort 1 --model gpt2 --device cpu --seq 16 --json "+file)...).status)
	r = command("plan", "--from", file, "--gpu", "t4-16")
	require.Zero(t, r.status, r.stderr)
}
