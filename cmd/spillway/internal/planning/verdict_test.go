package planning_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/planning"
	"github.com/spillway-ml/spillway/internal/hostmem"
)

// verdictOf returns the text before the first empty line, and the command in it.
func verdictOf(t *testing.T, text string) (verdict, line string) {
	t.Helper()
	verdict, _, ok := strings.Cut(text, "\n\n")
	require.True(t, ok, text)
	require.LessOrEqual(t, strings.Count(verdict, "\n")+1, 15, verdict)
	m := regexp.MustCompile(`(?m)^  ((?:spillway|srun|mpirun) .*)$`).FindStringSubmatch(strings.ReplaceAll(verdict, " \\\n    ", " "))
	if m == nil {
		return verdict, ""
	}
	return verdict, m[1]
}

// A plan begins with its answer: whether it fits, a command, memory, time and speed.
func TestThePlanBeginsWithItsVerdict(t *testing.T) {
	tiny := "--model " + testdata + "/gpt2 --batch 1 --seq 16 "
	for _, c := range []struct{ args, says, command string }{
		{tiny, "on 1 CPU rank fits as requested, and nothing found is faster:", `^spillway train --batch 1 --model \S+ --seq 16 --data DATA$`},
		{tiny + "--ranks 2 --recompute full --offload optimizer=host", `on 2 CPU ranks fits as requested; this is [\d.]+ × as fast:`, `^spillway train .*--ranks 2 .*--recompute none --offload none$`},
		{tiny + "--ranks 2 --transport shm", "", `^spillway launch -n 2 -- train --batch 1 `},
		{tiny + "--ranks 2 --transport mpi", "", `^mpirun -np 2 spillway train --batch 1 `},
		{tiny + "--ranks 4 --zero 0 --device-memory 400KiB", "does not fit as requested", `^spillway train .*--device-memory 400KiB`},
		{tiny + "--device-memory 10KB", "does not fit as requested .* nothing tried makes it fit", `^$`},
		{tiny + "--gpu h100-80 --nodes 2 --gpus-per-node 2", "on 4 × h100-80 fits", `^srun --nodes=2 --ntasks-per-node=2 spillway train .*--device cuda`},
		{tiny + "--gpu h100-80 --nodes 1 --gpus-per-node 2 --node-memory 64GB", "on 2 × h100-80 fits", `^spillway train .*--ranks 2 --device cuda --host-memory 32GB --data DATA`},
		{tiny + "--gpu mi300x", `fits.*: planned only: --device cuda runs on NVIDIA's GPUs alone`, `^spillway plan .*--gpu mi300x`},
		{tiny + "--gpu h100-80 --precision bf16 --int8 matmul", "planned only: --int8 with --device cuda", `^spillway plan `},
		{"--model llama-3-8b --gpu a100-40 --nodes 1 --gpus-per-node 8 --precision bf16 --seq 2048 --batch 4 --tokens 1e9 --price 2", `on 8 × a100-40 does not fit as requested \(.* of device memory over the cap\); this fits:`, `^spillway train `},
	} {
		r := command(append([]string{"plan", "--effort", "60"}, strings.Fields(c.args)...)...)
		verdict, line := verdictOf(t, r.stdout)
		require.Regexp(t, c.says, unwrapped(verdict), c.args)
		require.Regexp(t, c.command, line, c.args)
		for _, row := range []string{"device memory ", "host memory ", "step ", "tokens/s "} {
			require.Contains(t, verdict, "\n  "+row, c.args)
		}
		require.Equal(t, strings.Contains(c.args, "--price"), strings.Contains(verdict, "which cost"), c.args)
	}
}

// The command of a verdict runs unchanged, given its data.
func TestTheCommandOfAVerdictRuns(t *testing.T) {
	for _, more := range []string{"", "--recompute full --zero 1 --accum 2", "--fit --global-batch 4", "--device-memory 700KiB --zero 0"} {
		args := append(strings.Fields("plan --effort 40 --model "+testdata+"/gpt2 --batch 1 --seq 16 --ranks 2 --steps 1 --data "+testdata+"/text.bin"), strings.Fields(more)...)
		_, line := verdictOf(t, command(args...).stdout)
		require.True(t, strings.HasPrefix(line, "spillway train "), line)
		got := command(words(line)[1:]...)
		require.Equal(t, cli.ExitDone, got.status, "%s\n%s", line, got.stderr)
	}
}

// A plan for this machine's CPU reports if train refuses it because of the machine's memory.
func TestTheVerdictKnowsThisMachine(t *testing.T) {
	if hostmem.Machine() == 0 {
		t.Skip("the system does not tell its memory")
	}
	args := strings.Fields("--model gpt3-175b --ranks 2 --seq 16 --batch 1 --prefetch 1")
	refused := command(append([]string{"train", "--data", testdata + "/text.bin", "--tokenizer", "bytes"}, args...)...)
	m := regexp.MustCompile(`2 ranks on this machine plan (\S+ \S+) of memory together and it has (\S+ \w+)`).FindStringSubmatch(refused.stderr)
	require.NotNil(t, m, refused.stderr)
	page, kept := filepath.Join(t.TempDir(), "p.html"), filepath.Join(t.TempDir(), "p.json")
	args = append(args, "--effort", "1")
	r := command(append([]string{"plan", "--html", page, "--json", kept}, args...)...)
	require.Zero(t, r.status, r.stderr)
	want := "train refuses it here: it takes " + m[1] + " of memory and this machine has " + m[2]
	require.Contains(t, unwrapped(r.stdout), want)
	html, err := os.ReadFile(page)
	require.NoError(t, err)
	require.Contains(t, string(html), want)
	for _, elsewhere := range [][]string{{"--from", kept}, append([]string{"--nodes", "2"}, args...)} {
		require.NotContains(t, command(append([]string{"plan"}, elsewhere...)...).stdout, "this machine has")
	}
	require.NotContains(t, command("plan", "--model", testdata+"/gpt2", "--effort", "1").stdout, "this machine has")
}

// The command of an answer has the value found by --ask.
func TestTheCommandOfAnAnswerHasItsValue(t *testing.T) {
	for _, c := range []struct{ flag, args string }{
		{"ranks", "--ask gpus --device-memory 355MiB --model " + testdata + "/gpt2"},
		{"model", "--ask model --device-memory 1GiB"},
		{"batch", "--ask batch --device-memory 355MiB --model " + testdata + "/gpt2"},
		{"seq", "--ask seq --batch 64 --model gpt2"},
		{"device-memory", "--ask device-memory --model " + testdata + "/gpt2"},
		{"host-memory", "--ask host-memory --model " + testdata + "/gpt2"},
	} {
		args := append(strings.Fields("plan --gpu t4-16 --offload none --recompute none --prefetch 1"), strings.Fields(c.args)...)
		r := command(append(args, "--json", "-")...)
		require.Zero(t, r.status, r.stderr)
		var doc planning.Doc
		require.NoError(t, json.Unmarshal([]byte(r.stdout), &doc))
		got := words(doc.Run)
		require.Equal(t, []string{"spillway", "train"}, got[:2])
		fs := options.TrainSet()
		require.NoError(t, fs.Parse(got[2:]), doc.Run)
		require.Contains(t, words(doc.Answer.Flags), fs.Lookup(c.flag).Value.String(), "%s: %s", c.args, doc.Run)
		require.True(t, fs.Changed(c.flag), doc.Run)
		require.Equal(t, doc.Answer.Flags, doc.Recommended.Flags)
		if c.flag == "seq" { // the request sets bf16, so it is not the defaults
			require.NotContains(t, command(args...).stdout, "as requested means the defaults here")
		}
	}
}

// On one rank all stages are the same, and tables have one column.
func TestOneRankHasOneColumn(t *testing.T) {
	text := command("plan", "--model", testdata+"/gpt2", "--effort", "1").stdout
	require.Regexp(t, `(?m)^  ZeRO +→ 3$`, text)
	text = command("plan", "--model", testdata+"/gpt2", "--ranks", "2", "--effort", "1").stdout
	require.Regexp(t, `(?m)^  ZeRO +0 +1 +2 +→ 3$`, text)
}
