package planning_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// The recommended flags, added to those of any request, give the recommended plan.
func TestRecommendedFlagsReproduceIt(t *testing.T) {
	t.Parallel()
	tiny := "--model " + testdata + "/gpt2 --batch 2 --seq 16 --ranks 2 "
	for i, line := range long.Sample(3, 4, []string{
		tiny + "--offload optimizer=host,activations=host",
		tiny + "--recompute full --zero 1 --accum 2",
		tiny + "--recompute auto --offload parameters=host --prefetch 0",
		tiny + "--fit --global-batch 16",
		"--model " + testdata + "/gpt2 --seq 16 --ranks 1 --fit --batch 4 --global-batch 16",
		"--model spillway-ledger --ranks 2 --offload optimizer=host --recompute auto --zero 1 --device-memory 48MiB",
		"--model spillway-ledger --ranks 2 --batch 8 --recompute selective --prefetch 0 --device-memory 60MiB",
	}) {
		args := strings.Fields(line)
		_, doc := planned(t, args...)
		require.NotNil(t, doc.Recommended, line)
		flags := doc.Recommended.Flags
		_, again := planned(t, append(slices.Clone(args), words(flags)...)...)
		require.Equal(t, doc.Recommended.Plan, again.Requested, "%s with %s", line, flags)
		if i%3 == 0 { // this needs another search
			if text := command(append([]string{"plan", "--effort", "40"}, args...)...).stdout; !strings.Contains(text, "fits as requested, and nothing found is faster") {
				require.Contains(t, strings.ReplaceAll(text, " \\\n    --", " --"), flags, line)
			}
		}
		if strings.Contains(line, "--global-batch") {
			require.Contains(t, flags, "--accum ", line)
		}
	}
}

// Among plans within 1 % of the fastest, the one with the shortest flags is recommended.
func TestShortFlagsAreRecommended(t *testing.T) {
	_, doc := planned(t, strings.Fields("--model llama-3-8b --gpu rtx-4090 --precision bf16 --seq 1024 --batch 1 --lora r=8,alpha=16,targets=*_proj.* --base int8")...)
	require.Equal(t, "--zero 3 --prefetch 2 --recompute none --offload none", doc.Recommended.Flags)
}

// With --global-batch the micro-batch is chosen: the recommended plan is at least as fast as for
// any given micro-batch.
func TestOpenMicroBatchIsChosen(t *testing.T) {
	step := func(args ...string) (float64, string) {
		_, doc := planned(t, append([]string{"--model", testdata + "/gpt2", "--gpu", "a100-80", "--seq", "16", "--ranks", "2", "--global-batch", "16"}, args...)...)
		require.NotNil(t, doc.Recommended)
		return doc.Recommended.Plan.StepSeconds, doc.Recommended.Flags
	}
	open, flags := step()
	require.Contains(t, flags, "--batch 8 --accum 1")
	for _, batch := range []string{"1", "2", "8"} {
		named, _ := step("--batch", batch)
		require.LessOrEqual(t, open, named, batch)
	}
}

// If --fit finds nothing, the request is reported all the same.
func TestFitWithoutOutcomeTellsTheRequest(t *testing.T) {
	page := filepath.Join(t.TempDir(), "plan.html")
	args := []string{"--model", testdata + "/gpt2", "--batch", "1", "--seq", "16", "--device-memory", "10KB"}
	plain := command(append([]string{"plan"}, args...)...)
	args = append(args, "--fit")
	fit := command(append([]string{"plan"}, args...)...)
	require.Equal(t, cli.ExitDoesNotFit, fit.status)
	require.Equal(t, plain.stdout, fit.stdout)
	require.Contains(t, fit.stderr, "spillway: nothing of ")
	status, doc := planned(t, append(args, "--html", page)...)
	require.Equal(t, cli.ExitDoesNotFit, status)
	require.False(t, doc.Requested.Fits)
	require.Nil(t, doc.Recommended)
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	require.Contains(t, string(text), "Nothing makes it fit")
	require.Contains(t, string(text), "configurations tried makes it fit")
}

// The page and the text recommend the same.
func TestPageRecommends(t *testing.T) {
	page := filepath.Join(t.TempDir(), "plan.html")
	_, doc := planned(t, "--model", testdata+"/gpt2", "--batch", "1", "--seq", "16", "--recompute", "full", "--offload", "optimizer=host", "--html", page)
	require.Regexp(t, "--recompute none --offload none$", doc.Recommended.Flags)
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	require.Contains(t, string(text), "<h2>Recommended</h2>")
	require.Contains(t, string(text), "<code>"+doc.Recommended.Flags+"</code>")
}

// Lines fit the terminal's width, except single words and a flag with its value, which would not be
// copied correctly if broken.
func TestReportIsAsWideAsATerminal(t *testing.T) {
	for _, line := range []string{
		"--model gpt2 --ranks 4 --accum 4 --device-memory 900MiB --reference megatron",
		"--model gpt2 --ranks 2 --accum 2 --offload optimizer=host --fit",
		"--model " + testdata + "/gpt2 --device-memory 10KB",
		"--model llama-3-8b --gpu a100-40 --nodes 1 --gpus-per-node 8 --precision bf16 --seq 2048 --batch 4",
		"--model llama-3-8b --gpu h100-80 --nodes 1 --gpus-per-node 8 --seq 4096 --batch 1 --tensor 4",
		"--model llama-3-8b --gpu h100-80 --nodes 2 --gpus-per-node 8 --seq 4096 --batch 1 --shard-size 8",
	} {
		for _, l := range strings.Split(command(append([]string{"plan", "--effort", "20"}, strings.Fields(line)...)...).stdout, "\n") {
			words := strings.Fields(l)
			if len(words) < 2 || len(words) < 4 && strings.HasPrefix(words[0], "--") { // --flag value \
				continue
			}
			require.LessOrEqual(t, utf8.RuneCountInString(strings.TrimRight(l, " ")), cli.Terminal, "%s: %s", line, l)
		}
	}
}

// Lines break between flags, so that a shell reads the same words.
func TestWrapFlags(t *testing.T) {
	long := "'drop:" + strings.Repeat("x", 90) + "'"
	flags := "--zero 3 --precision bf16 --prefetch 2 --recompute " + long + " --offload optimizer=host:75% --batch 1"
	var out strings.Builder
	cli.WrapFlags(&out, "recommended: ", "  ", flags)
	require.Equal(t, "recommended: --zero 3 --precision bf16 --prefetch 2 \\\n  --recompute "+long+" \\\n  --offload optimizer=host:75% --batch 1\n", out.String())
	require.Equal(t, words(flags), words(strings.ReplaceAll(strings.TrimPrefix(out.String(), "recommended:"), "\\\n", "")))
	out.Reset()
	exact := "--zero 3" + strings.Repeat(" --batch 1", 7) // 80 columns with its indentation
	cli.WrapFlags(&out, "  ", "    ", exact)
	require.Equal(t, "  "+exact+"\n", out.String(), "what fits a line is not broken")
}

// Unwritable files are found before planning, and writable ones are unchanged until then.
func TestPlanOutputsAreTriedFirst(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, []byte("kept"), 0o644))
	for _, flag := range []string{"--json", "--html"} {
		for _, path := range []string{dir, filepath.Join(file, "below")} {
			r := command("plan", "--model", "gpt2", flag, path)
			require.Equal(t, cli.ExitBadInput, r.status)
			require.Empty(t, r.stdout, "it was planned first")
			require.Contains(t, r.stderr, "spillway: "+flag+": ")
		}
		other := filepath.Join(dir, "new")
		require.Equal(t, cli.ExitBadInput, command("plan", "--model", "gpt9", flag, file).status)
		require.Equal(t, cli.ExitBadInput, command("plan", "--model", "gpt9", flag, other).status)
		require.NoFileExists(t, other)
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		require.Equal(t, "kept", string(text))
	}
}

// A suggestion that adds a disk places data there.
func TestSuggestedDiskIsUsed(t *testing.T) {
	t.Parallel()
	c, hw := asPlanned(t, strings.Fields("--effort 100 --model gpt2 --ranks 2 --zero 1 --batch 1 --device-memory 700MiB --host-memory 700MiB"))
	asked, err := spillway.Predict(t.Context(), c, hw.Machine(c.Ranks))
	require.NoError(t, err)
	ways, _ := spillway.WaysOut(t.Context(), asked, hw)
	require.NotEmpty(t, ways)
	for _, way := range ways {
		if slices.Contains(cli.ArgsOf(way.Changes), "--disk") {
			require.Positive(t, way.Forecast.Plan.Layout.Spaces[graph.Disk].Peak, cli.FlagText(way.Changes))
		}
	}
}

// A recommended stage with other bits is reported; this happens only with accumulation.
func TestOtherBitsAreTold(t *testing.T) {
	const told = "differs from stage 3 in the last bits; --reproducible makes them equal"
	args := []string{"--model", testdata + "/gpt2", "--data", testdata + "/text.bin", "--steps", "1", "--batch", "1", "--seq", "16", "--ranks", "2", "--fit"}
	for _, c := range []struct {
		more []string
		want bool
	}{
		{[]string{"--accum", "2"}, true},
		{nil, false},
		{[]string{"--accum", "2", "--reproducible"}, false},
		{[]string{"--accum", "2", "--zero", "1"}, false}, // a given setting is not reported
	} {
		r := command(slices.Concat([]string{"plan", "--effort", "60"}, args, c.more)...)
		require.Equal(t, cli.ExitDone, r.status, r.stderr)
		require.Regexp(t, "--zero [01] ", r.stdout)
		require.Equal(t, c.want, strings.Contains(unwrapped(r.stdout), told), r.stdout)
	}
	r := command(slices.Concat([]string{"train"}, args, []string{"--accum", "2"})...)
	require.Equal(t, cli.ExitDone, r.status, r.stderr)
	require.Contains(t, unwrapped(r.stderr), told)
}
