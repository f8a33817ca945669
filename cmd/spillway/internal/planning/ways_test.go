package planning_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/here"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/planning"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/training"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/model"
)

// asPlanned parses the flags of `spillway plan`.
func asPlanned(t *testing.T, args []string) (spillway.Config, spillway.Hardware) {
	t.Helper()
	var c spillway.Config
	var l options.Later
	var f planning.Flags
	fs := pflag.NewFlagSet("plan", pflag.ContinueOnError)
	options.Train(fs, &c, &l)
	f.Bind(fs, &c)
	require.NoError(t, fs.Parse(args), args)
	require.NoError(t, f.Settle(fs, &c), args)
	require.NoError(t, l.Follow(fs, &c, io.Discard), args)
	require.NoError(t, c.Validate(), args)
	f.CPU, f.Rates = planning.KnownHardware(here.Machine{}, c.ComputeThreads())
	return c, f.Hardware(&c)
}

// Every suggestion for a model that does not fit a GPU fits when added to the flags. The test runs
// two presets; SPILLWAY_LONG=all runs each preset on each GPU, for an hour.
func TestWaysOutOverPresets(t *testing.T) {
	t.Parallel()
	lines := []string{"--model gpt2-xl --gpu v100-16 --seq 1024 --batch 4 --zero 1 --ranks 4",
		"--model llama-3.2-1b --gpu rtx-3090 --ranks 2 --zero 1 --precision bf16 --seq 2048 --batch 8",
		"--model spillway-demo --ranks 4 --global-batch 64 --device-memory 20MiB --effort 400"}
	if models, cards := model.Presets(), gpus.List(); long.All() {
		shapes := []string{"", "--nodes 1 --gpus-per-node 8", "--zero 1 --ranks 4", "--nodes 4 --gpus-per-node 8 --shard-size 8", "--host-memory 24GiB --recompute selective"}
		for i := range len(models) * len(cards) {
			m, g := models[i%len(models)], cards[(i/len(models)+i)%len(cards)]
			lines = append(lines, fmt.Sprintf("--model %s --gpu %s --seq %d --batch %d --precision %s %s", m.Name, g.Name, min(m.Config.Positions, 2048), 1+i%4*3, []string{"fp32", "bf16"}[i%2], shapes[i%len(shapes)]))
		}
	}
	tried, none, shared := 0, 0, 0
	for _, line := range lines {
		args := append([]string{"--effort", "100"}, strings.Fields(line)...)
		c, hw := asPlanned(t, args)
		asked, err := spillway.Predict(t.Context(), c, hw.Machine(c.Ranks))
		require.NoError(t, err, args)
		if asked.Fits {
			continue
		}
		tried++
		ways, no := spillway.WaysOut(t.Context(), asked, hw)
		if len(ways) == 0 {
			none++
			require.NotNil(t, no, args)
			require.NotNil(t, no.Nearest, args)
			t.Logf("%v: %s", args, no)
			continue
		}
		last := 0.0
		for _, way := range ways {
			applied, machine := asPlanned(t, append(append([]string{}, args...), cli.ArgsOf(way.Changes)...))
			require.Equal(t, words(cli.FlagText(way.Changes)), cli.ArgsOf(way.Changes))
			f, err := spillway.Predict(t.Context(), applied, machine.Machine(applied.Ranks))
			require.NoError(t, err, "%v %s", args, cli.FlagText(way.Changes))
			require.True(t, f.Fits, "%v %s", args, cli.FlagText(way.Changes))
			if c.GlobalBatch > 0 && way.Cost == "more ranks" {
				require.Equal(t, c.GlobalBatch, f.Config.StepRows())
				shared++
			}
			require.InEpsilon(t, way.Forecast.Step.Seconds, f.Step.Seconds, 1e-9)
			if way.Cost == "" { // ways that keep the job are sorted by time and listed first
				require.GreaterOrEqual(t, way.Slowdown, last, args)
				last = way.Slowdown
			}
		}
	}
	require.Positive(t, shared)
	require.Greater(t, tried, none)
	t.Logf("%d did not fit, %d of them with nothing that helps", tried, none)
}

// The commands in a refusal of --fit with a global batch run. If one changes the rows of a step, it
// sets the global batch to them.
func TestWaysOutOfAGlobalBatchRun(t *testing.T) {
	t.Parallel()
	model := edited(t, "gpt2", func(c map[string]any) {
		c["n_layer"], c["n_head"], c["n_embd"], c["vocab_size"], c["n_positions"] = 3, 2, 64, 256, 256
	})
	args := []string{"train", "--model", model, "--data", testdata + "/text.bin", "--device-memory", "2MiB", "--batch", "8", "--seq", "256", "--fit", "--global-batch", "8", "--steps", "1"}
	refused := command(args...)
	require.Equal(t, cli.ExitDoesNotFit, refused.status, refused.stderr)
	ways := regexp.MustCompile(`(?m)^  spillway (.*?)(  #.*)?$`).FindAllStringSubmatch(refused.stderr, -1)
	require.NotEmpty(t, ways, refused.stderr)
	for _, way := range ways {
		got := command(words(way[1])...)
		require.Equal(t, cli.ExitDone, got.status, "%s\n%s", way[1], got.stderr)
	}

	cmd := training.Command()
	require.NoError(t, cmd.Flags().Parse(args[1:]))
	var out strings.Builder
	two := spillway.Config{Ranks: 2, Batch: 8, Accum: 1}
	cli.PrintError(&out, &spillway.Refusal{Cause: errors.New("does not fit"), Ways: []spillway.Way{{Changes: spillway.Settings{{Field: "Config.Ranks", Value: "2"}}, Forecast: &spillway.Forecast{Config: two}}}}, args, cmd)
	require.Contains(t, out.String(), "--ranks 2 --global-batch 16")
	require.NotContains(t, out.String(), "--global-batch 8")
}

// The command suggested for a job over processes starts the same number, with the same launcher.
func TestWaysOutOfAJob(t *testing.T) {
	t.Setenv("SLURM_STEP_NUM_TASKS", "")
	args := []string{"train", "--model", "m", "--ranks", "4", "--zero", "0"}
	more := []string{"--ranks", "8", "--zero", "3"}
	for _, c := range []struct {
		source            cluster.Source
		world, ranks      int
		each              int
		flags             []string
		want, withoutRank string
	}{
		{cluster.Alone, 1, 8, 1, more, "spillway train --model m --ranks 8 --zero 3", ""},
		{cluster.Launch, 4, 8, 1, more, "spillway launch -n 8 -- train --model m --zero 3", "--ranks"},
		{cluster.Launch, 2, 4, 2, []string{"--zero", "2"}, "spillway launch -n 2 -- train --model m --zero 2", "--ranks"},
		{cluster.Launch, 2, 3, 2, []string{"--ranks", "3"}, "spillway launch -n 3 -- train --model m --zero 0 --ranks-per-process 1", "--ranks "},
		{cluster.OpenMPI, 4, 8, 1, more, "mpirun -np 8 spillway train --model m --zero 3", "--ranks"},
		{cluster.PMI, 4, 4, 1, []string{"--zero", "1"}, "mpirun -np 4 spillway train --model m --zero 1", "--ranks"},
		{cluster.Slurm, 4, 4, 1, []string{"--zero", "1"}, "srun -n 4 spillway train --model m --zero 1", "--ranks"},
		{cluster.Torchrun, 4, 4, 1, []string{"--zero", "1"}, "spillway train --model m --zero 1", "--ranks"},
		{cluster.Torchrun, 4, 8, 1, []string{"--zero", "3", "--ranks", "8"}, "spillway train --model m --zero 3  # as 8 processes", "--ranks"},
	} {
		got := cli.WholeCommand(cluster.Env{Source: c.source, World: c.world}, c.ranks, c.each, args, c.flags)
		require.Equal(t, c.want, got, c.source)
		if c.withoutRank != "" {
			require.NotContains(t, got, c.withoutRank)
		}
	}
	t.Setenv("SLURM_STEP_NUM_TASKS", "4")
	require.Equal(t, "srun -n 4 spillway train --zero 1", cli.WholeCommand(cluster.Env{Source: cluster.PMI, World: 4}, 4, 1, []string{"train"}, []string{"--zero", "1"}))
}

func TestPlanInParts(t *testing.T) {
	base := []string{"--model", testdata + "/gpt2", "--batch", "1", "--seq", "16"}
	status, doc := planned(t, append(base, "--offload", "optimizer=host:50%,activations=host:h.{0-0}.mlp.act")...)
	require.Equal(t, cli.ExitDone, status)
	require.Positive(t, doc.Requested.Host.ByClass["optimizer"])
	require.Positive(t, doc.Requested.Device.ByClass["optimizer"])
	for flags, want := range map[string]string{
		"--offload optimizer=host:0%":           "over 0 and up to 100",
		"--offload activations=host:30%":        "go by buffers",
		"--offload parameters=disk:h.*":         "not a share",
		"--recompute drop":                      "names of buffers",
		"--recompute drop:h.99.mlp.act":         "those are h.*",
		"--recompute auto;full":                 "auto stands alone",
		"--offload activations=host:nope":       "no activation matches",
		"--allow fp8":                           "bf16",
		"--offload optimizer=host:60%+disk:50%": "110 %",
	} {
		name, value, _ := strings.Cut(flags, " ")
		r := command(append(append([]string{"plan"}, base...), name, value)...)
		require.Equal(t, cli.ExitBadInput, r.status, flags)
		require.Contains(t, r.stderr, want, flags)
		require.Equal(t, 1, strings.Count(r.stderr, "\n"), r.stderr)
	}
}

// The plan prints the choice of auto, and train runs it.
func TestAutoIsPrintedAndRun(t *testing.T) {
	shape := []string{"--model", testdata + "/gpt2", "--batch", "2", "--seq", "16"}
	_, doc := planned(t, shape...)
	_, full := planned(t, append(shape, "--recompute", "full")...)
	limit := fmt.Sprint((doc.Requested.Device.PeakBytes + full.Requested.Device.PeakBytes) / 2)
	args := append(shape, "--device-memory", limit, "--recompute", "auto")
	file := filepath.Join(t.TempDir(), "plan.json")
	r := command(append([]string{"plan", "--json", file}, args...)...)
	require.Equal(t, cli.ExitDone, r.status, r.stderr)
	written, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Contains(t, string(written), `"recompute": "drop:`)
	require.Contains(t, string(written), `"explanation"`)
	_, chosen, found := strings.Cut(r.stdout, "recompute auto: ")
	require.True(t, found, r.stdout)
	chosen, _, _ = strings.Cut(chosen, "\n")
	ran := command(append([]string{"train", "--data", testdata + "/text.bin", "--steps", "1"}, args...)...)
	require.Equal(t, cli.ExitDone, ran.status, ran.stderr)
	require.Contains(t, ran.stderr, "recompute auto: "+chosen)
	r = command(append([]string{"train", "--data", testdata + "/text.bin", "--steps", "1", "--recompute", "auto"}, shape...)...)
	require.Contains(t, r.stderr, "no cap on device memory")
}
