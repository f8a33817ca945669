package planning_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/calibration"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/planning"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/model"
)

// A search that finds nothing reports the same in JSON as in the text.
func TestNothingFitsInJSON(t *testing.T) {
	file := filepath.Join(t.TempDir(), "plan.json")
	args := []string{"plan", "--fit", "--model", testdata + "/gpt2", "--device-memory", "1KiB", "--json"}
	alone, beside := command(append(args, "-")...), command(append(args, file)...)
	require.Equal(t, cli.ExitDoesNotFit, alone.status, alone.stderr)
	require.Equal(t, beside.status, alone.status)
	require.Equal(t, beside.stderr, alone.stderr)
	doc, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(doc), alone.stdout)
	require.Contains(t, beside.stdout, "Tried in vain")
}

func TestPlanJSON(t *testing.T) {
	for _, args := range [][]string{
		{"--model", "gpt2"},
		{"--model", testdata + "/gpt2", "--ranks", "4", "--accum", "3", "--device-memory", "200KiB", "--host-memory", "1GiB"},
		{"--model", testdata + "/gpt2", "--ranks", "4", "--precision", "fp16", "--recompute", "full"},
		{"--model", "llama-3.2-1b", "--gpu", "H100-80", "--nodes", "2", "--gpus-per-node", "8", "--precision", "bf16", "--seq", "2048", "--batch", "1"},
		{"--model", testdata + "/llama-tied", "--gpu", "a100-80", "--nodes", "2", "--gpus-per-node", "8", "--shard-size", "8", "--precision", "bf16", "--zero", "2"},
	} {
		status, doc := planned(t, append(args, "--effort", "1")...)
		require.Equal(t, doc.Requested.Fits, status == cli.ExitDone, args)
		if !doc.Requested.Fits {
			require.Equal(t, cli.ExitDoesNotFit, status, args)
		}
		require.Len(t, doc.Stages, 4)
		require.Equal(t, doc.Stages[doc.Requested.Zero], doc.Requested)
		for z, s := range doc.Stages {
			require.Equal(t, z, s.Zero)
			require.Positive(t, s.StepSeconds)
			fits := true
			for _, sp := range []planning.Space{s.Device, s.Host, s.Disk} {
				var sum int64
				for class, n := range sp.ByClass {
					sum += n
					require.LessOrEqual(t, n, sp.ClassPeakBytes[class], "%v stage %d %s", args, z, class)
				}
				require.Len(t, sp.ByClass, 9)
				require.Equal(t, sp.PeakBytes, sum, "%v stage %d", args, z)
				require.Equal(t, sp.PeakBytes > 0, sp.PeakAt != "")
				if sp.CapacityBytes != nil {
					fits = fits && sp.PeakBytes+sp.OutsideBytes <= *sp.CapacityBytes
				}
			}
			require.Equal(t, fits, s.Fits, "%v stage %d", args, z)
		}
	}
}

func TestPlanOfAGPUHasItsMemory(t *testing.T) {
	_, doc := planned(t, "--model", testdata+"/gpt2", "--gpu", "rtx-4090", "--effort", "1")
	g, err := gpus.Lookup("rtx-4090")
	require.NoError(t, err)
	require.Equal(t, g.Memory, *doc.Requested.Device.CapacityBytes)
	require.Equal(t, g.OutsideBytes(), doc.Requested.Device.OutsideBytes)
	_, doc = planned(t, "--model", "gpt2", "--gpu", "rtx-4090", "--device-memory", "1GiB", "--effort", "1")
	require.Equal(t, int64(1<<30), *doc.Requested.Device.CapacityBytes)
	scratch := doc.Requested.Device.ClassPeakBytes["workspace"]
	_, doc = planned(t, "--model", "gpt2", "--effort", "1")
	require.Nil(t, doc.Requested.Device.CapacityBytes)
	require.Zero(t, doc.Requested.Device.OutsideBytes)
	require.Greater(t, scratch, doc.Requested.Device.ClassPeakBytes["workspace"], "a GPU's kernels have workspace of their own")
}

// plan and train have the same limit: the peak fits, a byte less does not.
func TestPlanAndTrainAgree(t *testing.T) {
	shape := []string{"--model", testdata + "/gpt2", "--batch", "1", "--seq", "16", "--ranks", "2"}
	_, doc := planned(t, append(shape, "--effort", "1")...)
	peak := doc.Requested.Device.PeakBytes
	for less, want := range []int{cli.ExitDone, cli.ExitDoesNotFit} {
		limit := []string{"--device-memory", fmt.Sprint(peak - int64(less))}
		status, _ := planned(t, slices.Concat(shape, limit, []string{"--effort", "1"})...)
		require.Equal(t, want, status)
		r := command(append(append([]string{"train", "--data", testdata + "/text.bin", "--steps", "1"}, shape...), limit...)...)
		require.Equal(t, want, r.status, r.stderr)
	}
}

// heads writes a GPT-2 with n heads and returns its folder.
func heads(t *testing.T, n, width int) string {
	return edited(t, "gpt2", func(c map[string]any) { c["n_head"], c["n_embd"] = n, width })
}

func TestPlanBadInput(t *testing.T) {
	for _, c := range []struct {
		args string
		want []string
	}{
		{"", []string{"--model"}},
		{"--model gpt9", []string{"gpt9", "gpt2"}},
		{"--model gpt2 --gpu h10-80", []string{"h10-80", "h100-80"}},
		{"--model gpt2 --nodes 0", []string{"--nodes 0", "at least 1"}},
		{"--model gpt2 --gpus-per-node 0", []string{"--gpus-per-node 0"}},
		{"--model gpt2 --nodes 2 --gpus-per-node 4 --ranks 9", []string{"--ranks 9", "8"}},
		{"--model gpt2 --ranks 8 --shard-size 3", []string{"2 or 4"}},
		{"--model gpt2 --shard-size 0", []string{"--shard-size 0"}},
		{"--model gpt2 --precision fp8", []string{"fp8", "bf16"}},
		{"--model gpt2 --seq 1025", []string{"1025", "1024"}},
		{"--model gpt2 --zero 4", []string{"--zero 4"}},
		{"--model gpt2 --nodes 1000000000 --gpus-per-node 1000000000", []string{"--nodes"}},
		{"--model gpt2 --gpu tpu-v5", []string{"tpu-v5", "--list-gpus"}},
		{"--model gpt2 --gpu a100-88", []string{"a100-88", "nearest are a100-80, a100-40"}},
		{"--model llama-4-8b", []string{"llama-4-8b", "llama-3-8b"}},
		{"--model " + heads(t, 5, 32), []string{"n_head is 5", "n_embd 32", "use 4 or 8"}},
		{"--model " + heads(t, 0, 32), []string{"n_head"}},
		{"--model gpt2 --ranks 0", []string{"--ranks 0", "at least 1"}},
		{"--model gpt2 --seq -4", []string{"--seq -4", "at least 1 token", "leave it out"}},
		{"--model gpt2 --ranks -3", []string{"--ranks -3", "at least 1"}},
		{"--model gpt2 --gpus-per-node -8", []string{"--gpus-per-node -8", "at least 1"}},
		{"--model gpt2 --nodes 3 --ranks 4", []string{"--ranks 4", "which is 3"}},
		{"--model gpt2 --ranks 8 --shard-size 16", []string{"16 does not divide 8; use 8", "use 8"}},
		{"--model gpt2 --ranks 8 --shard-size -2", []string{"--shard-size -2", "at least 1"}},
		{"--model gpt2 --device-memory -5GiB", []string{"--device-memory", `"-5GiB"`, "GiB"}},
		{"--model gpt2 --host-memory -1", []string{"--host-memory", `"-1"`}},
		{"--model gpt2 --disk d:-4GiB", []string{"--disk", `"d:-4GiB"`, "not negative"}},
		{"--model gpt2 --device-memory 12XB", []string{`"12XB"`, "GiB"}},
		{"--model gpt2 --batch 0", []string{"--batch 0", "at least 1"}},
		{"--model gpt2 --batch -1", []string{"--batch -1"}},
		{"--model gpt2 --seq -1", []string{"--seq -1"}},
		{"--model gpt2 --seq 0", []string{"--seq 0", "at least 1"}},
		{"--model gpt2 --fit --global-batch 0", []string{"--global-batch 0", "at least 1"}},
		{"--model gpt2 --device cuda", []string{"--device cuda", "--gpu NAME", "detect"}},
		{"--model gpt2 --gpu=", []string{`--gpu ""`, "--list-gpus"}},
		{"--model gpt2 --html -", []string{"--html -", "file"}},
		{"--model gpt2 --accum 0", []string{"--accum 0"}},
		{"--model gpt2 --prefetch -1", []string{"--prefetch -1"}},
		{"--model gpt2 --recompute half", []string{"half", "selective"}},
		{"--model gpt2 --offload optimizer=tape", []string{"tape", "host or disk"}},
		{"--model gpt2 --optimizer adam", []string{"adam", "adamw"}},
		{"--nope", []string{"nope"}},
	} {
		r := command(append([]string{"plan"}, strings.Fields(c.args)...)...)
		require.Equal(t, cli.ExitBadInput, r.status, c.args)
		require.Empty(t, r.stdout, c.args)
		require.Equal(t, 1, strings.Count(r.stderr, "\n"), r.stderr)
		for _, w := range c.want {
			require.Contains(t, r.stderr, w, c.args)
		}
	}
	if _, err := gpus.Detect(); err != nil {
		r := command("plan", "--model", "gpt2", "--gpu", "detect")
		require.Equal(t, cli.ExitBadInput, r.status)
		require.Contains(t, r.stderr, "--gpu detect")
	}
	// A run with less memory than the GPU's context does not fit.
	require.Equal(t, cli.ExitDoesNotFit, command("plan", "--model", "gpt2", "--gpu", "h100-80", "--device-memory", "100MiB", "--effort", "1").status)
}

func TestPlanLists(t *testing.T) {
	r := command("plan", "--list-models")
	require.Zero(t, r.status)
	for _, p := range model.Presets() {
		require.Contains(t, r.stdout, p.Name+" ")
	}
	r = command("plan", "--list-gpus")
	require.Zero(t, r.status)
	for _, g := range gpus.List() {
		require.Contains(t, r.stdout, g.Name+" ")
	}
}

func TestPlanReportNamesWhatMatters(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "sub", "plan.json")
	r := command("plan", "--model", "gpt2", "--ranks", "4", "--device-memory", "900MiB", "--effort", "60", "--json", path)
	require.Equal(t, cli.ExitDoesNotFit, r.status)
	for _, want := range []string{"gpt2", "124,439,808", "Device memory", "Host memory", "activations", "unsharded", "Largest buffers", "What would make it fit", "--recompute"} {
		require.Contains(t, r.stdout, want)
	}
	require.Contains(t, r.stderr, "does not fit")
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.True(t, json.Valid(text))
}

// Ways out that change the results are in a separate list, in text, page and JSON.
func TestWaysOutThatChangeResultsStandApart(t *testing.T) {
	dir := t.TempDir()
	doc, page := filepath.Join(dir, "plan.json"), filepath.Join(dir, "plan.html")
	args := []string{"plan", "--model", "gpt2-xl", "--gpu", "v100-16", "--precision", "fp32", "--offload", "none", "--host-memory", "1GiB", "--json", doc, "--html", page}
	r := command(args...)
	require.Equal(t, cli.ExitDoesNotFit, r.status, r.stderr)
	const heading = "What would make it fit and changes the results"
	_, after, ok := strings.Cut(r.stdout, heading)
	require.True(t, ok, r.stdout)
	require.Contains(t, after, "costs other numbers")
	text, err := os.ReadFile(page)
	require.NoError(t, err)
	require.Contains(t, string(text), heading)
	text, err = os.ReadFile(doc)
	require.NoError(t, err)
	var got planning.Doc
	require.NoError(t, json.Unmarshal(text, &got))
	require.NotEmpty(t, got.Changing)
	for _, way := range got.Changing {
		require.True(t, way.ChangesResults)
	}
	for _, way := range got.Ways {
		require.False(t, way.ChangesResults)
	}
}

// words splits a line as a shell does: values in single quotes are one word.
func words(line string) (list []string) {
	for i, part := range strings.Split(line, "'") {
		if i%2 == 1 {
			list = append(list, part)
		} else {
			list = append(list, strings.Fields(part)...)
		}
	}
	return list
}

// Every suggestion fits when it is applied. The model has two wide layers, is planned quickly, and
// each kind of way helps it. SPILLWAY_LONG=all also tests presets.
func TestWaysOutFit(t *testing.T) {
	wide := edited(t, "llama-tied", func(c map[string]any) {
		c["hidden_size"], c["intermediate_size"], c["num_attention_heads"], c["num_key_value_heads"] = 8192, 28672, 64, 8
		c["vocab_size"], c["max_position_embeddings"] = 32000, 4096
	})
	grid := []string{
		"--ranks 4 --zero 0 --device-memory 20GiB",
		"--gpu rtx-3090 --ranks 2 --zero 1 --precision bf16 --seq 2048 --batch 8",
		"--gpu rtx-3090 --nodes 2 --gpus-per-node 8 --shard-size 2 --precision bf16 --seq 4096 --batch 4",
		"--gpu v100-16 --precision fp16 --seq 1024 --batch 4",
	}
	for i := range grid {
		grid[i] = "--model " + wide + " " + grid[i]
	}
	if long.All() {
		grid = append(grid,
			"--model gpt2 --ranks 4 --zero 0 --device-memory 1500MiB",
			"--model gpt2 --ranks 4 --device-memory 900MiB",
			"--model gpt2-medium --ranks 2 --zero 1 --device-memory 3GiB",
			"--model gpt2-xl --gpu rtx-4090 --seq 1024 --batch 8",
			"--model gpt2-xl --gpu v100-16 --ranks 4 --zero 0 --precision fp16 --seq 1024 --batch 4",
			"--model llama-3.2-1b --gpu rtx-3090 --ranks 2 --zero 1 --precision bf16 --seq 2048 --batch 8",
			"--model llama-2-7b --gpu a100-40 --nodes 1 --gpus-per-node 8 --precision bf16 --seq 4096 --batch 4 --zero 2",
			"--model llama-3-8b --gpu a100-40 --nodes 2 --gpus-per-node 8 --shard-size 2 --precision bf16 --seq 2048 --batch 2",
			"--model qwen-2.5-7b --gpu h200-141 --precision bf16 --seq 4096 --batch 8",
			"--model megatron-22b --gpu h100-80 --nodes 1 --gpus-per-node 8 --precision bf16 --seq 2048")
	}
	for _, line := range grid {
		args := strings.Fields(line)
		r := command(append([]string{"plan", "--effort", "100"}, args...)...)
		require.Equal(t, cli.ExitDoesNotFit, r.status, "%s: %s", line, r.stderr)
		_, after, ok := strings.Cut(r.stdout, "What would make it fit")
		require.True(t, ok, "%s has no way out:\n%s", line, r.stdout)
		ways := 0
		for _, l := range strings.Split(strings.ReplaceAll(after, " \\\n", ""), "\n") {
			flags := strings.TrimSpace(l)
			if !strings.HasPrefix(flags, "--") {
				continue
			}
			ways++
			c, hw := asPlanned(t, append(slices.Clone(args), words(flags)...))
			f, err := spillway.Predict(t.Context(), c, hw.Machine(c.Ranks))
			require.NoError(t, err, "%s with %s", line, flags)
			require.True(t, f.Fits, "%s with %s", line, flags)
		}
		require.Positive(t, ways, line)
	}
}

// The result of the search does not depend on which plan was ready first.
func TestWaysOutAreDeterministic(t *testing.T) {
	args := []string{"plan", "--model", "spillway-ledger", "--ranks", "4", "--zero", "1", "--device-memory", "30MiB", "--effort", "100"}
	first := command(args...)
	require.Equal(t, cli.ExitDoesNotFit, first.status)
	require.Equal(t, first, command(args...))
}

// Plans Megatron's model of a trillion parameters on 1,024 GPUs. Sharded over all of them it fits.
// Sharded over 8, with 128 replicas, it does not; the report lists configurations that fit.
func TestPlanOfATrillion(t *testing.T) {
	all := []string{"--model", "megatron-1t", "--gpu", "h100-80", "--nodes", "128", "--gpus-per-node", "8", "--batch", "1", "--precision", "bf16", "--recompute", "full"}
	status, doc := planned(t, append(all, "--effort", "1")...)
	require.Equal(t, cli.ExitDone, status)
	require.Equal(t, 1024, doc.Ranks)
	require.InEpsilon(t, 1.008e12, doc.Model.Parameters, 0.001)
	r := command(append([]string{"plan", "--effort", "40", "--shard-size", "8"}, all...)...)
	require.Equal(t, cli.ExitDoesNotFit, r.status, r.stderr)
	narrow(t, r.stdout)
	require.Contains(t, r.stdout, "--shard-size ")
}

func TestTrainRefusesWhatOnlyPlans(t *testing.T) {
	for _, flags := range [][]string{{"--int8", "gather"}, {"--int8", "gather", "--device", "cuda"}} {
		r := command(tinyWith(flags...)...)
		require.Equal(t, cli.ExitBadInput, r.status)
		require.Contains(t, r.stderr, strings.Join(flags[:2], " "))
	}
}

func TestPlanPage(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "plan.html")
	r := command("plan", "--model", "gpt2", "--ranks", "4", "--device-memory", "900MiB", "--effort", "60", "--html", path)
	require.Equal(t, cli.ExitDoesNotFit, r.status)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	for _, want := range []string{
		"Plan of gpt2", "Does not fit", "device memory over step, recommended", "device memory over step, as requested",
		"host memory over step, recommended", "The peak of device memory explained", "What would make it fit",
		"A step, predicted, by stage",
	} {
		require.Contains(t, string(text), want)
	}
	requirePage(t, path, 200_000)
	unspanned := regexp.MustCompile(`</?span[^>]*>`).ReplaceAll(text, nil) // flags are not broken
	made := regexp.MustCompile(`<code>spillway (plan [^<]*)</code>`).FindSubmatch(unspanned)
	require.NotNil(t, made)
	require.NoError(t, os.Remove(path))
	require.Equal(t, cli.ExitDoesNotFit, command(words(string(made[1]))...).status)
	again, err := os.ReadFile(path)
	require.NoError(t, err)
	before := func(page []byte) string { s, _, _ := strings.Cut(string(page), "</code>"); return s } // the date may change
	require.Equal(t, before(text), before(again), "the command on the page makes the page")
}

// train --fit runs the configuration that it recommends, within the cap.
func TestTrainFit(t *testing.T) {
	shape := []string{"--model", testdata + "/gpt2", "--batch", "1", "--seq", "16", "--ranks", "2"}
	_, doc := planned(t, shape...)
	limit := fmt.Sprint(doc.Stages[0].Device.PeakBytes - 1) // stage 0 does not fit without changes
	r := command(append([]string{"train", "--data", testdata + "/text.bin", "--steps", "1", "--fit", "--device-memory", limit}, shape...)...)
	require.Equal(t, cli.ExitDone, r.status, r.stderr)
	require.Contains(t, r.stderr, "recommended: --zero")
	r = command(append([]string{"plan", "--fit", "--effort", "60", "--device-memory", limit}, shape...)...)
	require.Equal(t, cli.ExitDone, r.status, r.stderr)
	require.Regexp(t, `fits; the fastest by prediction of \d+ configurations planned: spillway train --batch 1 `, unwrapped(r.stdout))
	require.Equal(t, cli.ExitBadInput, command(append([]string{"plan", "--effort", "10", "--global-batch", "7"}, shape...)...).status)
	require.Equal(t, cli.ExitDone, command(append([]string{"plan", "--effort", "10", "--global-batch", "8"}, shape...)...).status)
}

// The source of predicted times is printed, and a stored measurement is used by later plans.
func TestPlanTellsItsRates(t *testing.T) {
	ownworld.Config(t, t.TempDir())
	args := []string{"plan", "--model", "gpt2", "--threads", "2", "--effort", "20"}
	r := command(args...)
	require.Contains(t, r.stdout, "A step, predicted (CPU: rates of a typical server core; spillway plan\n  --calibrate measures this machine)\n")
	gpu := unwrapped(command(append(args, "--gpu", "h100-80")...).stdout)
	require.Regexp(t, `A step, predicted from the GPU's rates: published runs \(\d+, of torch, megatron, maxtext, llmq\) took \d\.\d\d to 1\.\d\d times as long as predicted`, gpu)
	require.Regexp(t, `time [\d.]+–[\d.]+ (µs|ms|s) computing`, gpu, "ranges of two digits, not four digits")
	_, before := planned(t, args[1:]...)

	slow := cost.Rates{Alone: cost.Rate{PerFlop: 1e-9}, Core: cost.Rate{PerFlop: 2e-9}}
	_, err := calibration.Keep(&cost.Calibration{Threads: 2, Rates: map[cost.Class]cost.Rates{"linear": slow}})
	require.NoError(t, err)
	require.Regexp(t, `A step, predicted \(CPU: as calibrated on \S+,\s+\d{4}-\d\d-\d\d\)`, command(args...).stdout)
	_, after := planned(t, args[1:]...)
	require.Greater(t, after.Requested.StepSeconds, 2*before.Requested.StepSeconds)
	require.Contains(t, unwrapped(command("plan", "--model", "gpt2", "--threads", "3", "--effort", "20").stdout), "is stale: it is for 2 threads, not for 3")
	r = command(append(args, "--calibrate", "--gpu", "h100-80")...)
	require.Equal(t, cli.ExitBadInput, r.status)
	require.Contains(t, r.stderr, "--calibrate measures this machine's CPU, and --gpu plans for a GPU")
}

// A plan uses the stored calibration. Package calibration tests the measurement of --calibrate.
func TestPlanCalibrates(t *testing.T) {
	ownworld.Config(t, t.TempDir())
	args := []string{"plan", "--model", testdata + "/gpt2", "--threads", "1", "--effort", "1"}
	if long.On() {
		require.Regexp(t, `^this machine's CPU as calibrated just now, kept in .*\n$`, command("plan", "--calibrate", "--threads", "1").stdout)
		require.Contains(t, unwrapped(command(append(args, "--calibrate")...).stdout), "A step, predicted (CPU: as calibrated just now, kept in ")
	} else {
		_, err := calibration.Keep(cost.Fit(1, cost.Samples{Alone: []cost.Sample{{Class: "linear", Size: cost.Size{Flops: 1e6}, Seconds: 1e-3}}}))
		require.NoError(t, err)
	}
	require.Contains(t, unwrapped(command(args...).stdout), "A step, predicted (CPU: as calibrated on ")
}

// A plan with a batch schedule gives the time of each of its batches.
func TestPlanOfABatchSchedule(t *testing.T) {
	path := filepath.Join(t.TempDir(), "plan.json")
	line := []string{"plan", "--model", testdata + "/gpt2", "--ranks", "2", "--batch", "1", "--seq", "16", "--effort", "20", "--json", path}
	got := command(append(line, "--batch-schedule", "0:4,50:64,70:2", "--tokens", "1e5")...)
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, strings.Join(strings.Fields(got.stdout), " "), "batch schedule: 4 rows from step 0 on, 64 rows from step 50 on, 2 rows from step 70")
	require.Contains(t, got.stdout, "accumulation 32: 1,024 tokens a step")
	require.Regexp(t, `(?m)^  of 4 rows .*\n  of 2 rows `, got.stdout)
	type stage struct {
		StepSeconds float64 `json:"step_seconds"`
		Batches     []struct {
			Rows, Accum int
			StepSeconds float64 `json:"step_seconds"`
		}
	}
	var doc struct {
		Requested   stage
		Recommended struct{ Plan stage }
		Budget      struct{ Days []float64 }
	}
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &doc))
	b := doc.Requested.Batches
	require.Len(t, b, 3)
	for i, want := range [][2]int{{64, 32}, {4, 2}, {2, 1}} {
		require.Equal(t, want, [2]int{b[i].Rows, b[i].Accum})
	}
	require.Equal(t, doc.Requested.StepSeconds, b[0].StepSeconds)
	require.Greater(t, b[0].StepSeconds, 4*b[1].StepSeconds)
	require.Greater(t, b[1].StepSeconds, b[2].StepSeconds)
	b = doc.Recommended.Plan.Batches
	// 50 steps of 64 tokens and 20 of 1,024; the remaining tokens of 100,000 at 32 per step.
	require.InEpsilon(t, (50*b[1].StepSeconds+20*b[0].StepSeconds+(1e5-50*64-20*1024)/32*b[2].StepSeconds)/86400, doc.Budget.Days[0], 1e-9)

	for rows, k := range map[string]int{"64": 0, "4": 1} { // the time in a plan of one batch
		alone := command(append(line, "--global-batch", rows)...)
		require.Zero(t, alone.status, alone.stderr)
		want := doc.Requested.Batches[k].StepSeconds
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(text, &doc))
		require.InEpsilon(t, doc.Requested.StepSeconds, want, 1e-9, rows)
	}
}

// A plan over shm or mpi counts the memory of each process, and its command starts that many.
func TestPlanCountsProcesses(t *testing.T) {
	args := []string{"--model", testdata + "/gpt2", "--ranks", "4", "--batch", "1", "--seq", "16", "--effort", "1"}
	_, one := planned(t, args...)
	outside := func(more ...string) (ranks, process int64, run string) {
		_, d := planned(t, slices.Concat(args, more)...)
		require.Equal(t, one.Requested.Device.PeakBytes, d.Requested.Device.PeakBytes)
		return 4 * d.Requested.Host.OutsideBytes, d.ProcessBytes, d.Run
	}
	all := 4 * one.Requested.Host.OutsideBytes
	most := int64(0)
	for each, start := range map[string]string{"1": "spillway launch -n 4 -- train ", "2": "spillway launch -n 2 -- train "} {
		ranks, process, run := outside("--transport", "shm", "--ranks-per-process", each)
		n, err := strconv.Atoi(each)
		require.NoError(t, err)
		require.Contains(t, run, start)
		require.Greater(t, ranks, all+int64(4/n-1)*20<<20, "each process has code and a heap")
		require.Greater(t, process*int64(4/n), one.ProcessBytes)
		most = max(most, ranks)
	}
	shm, _, _ := outside("--transport", "shm")
	require.Equal(t, most, shm, "a rank each by default")
	mpi, _, run := outside("--transport", "mpi")
	require.Contains(t, run, "mpirun -np 4 spillway train ")
	require.Greater(t, mpi, shm+4*10<<20, "the library and its messages")
	for _, c := range [][]string{
		{"--ranks-per-process", "2", "one process runs all ranks; give --transport shm or mpi for several"},
		{"--ranks-per-process", "3", "--transport", "shm", "--ranks-per-process 3 with --ranks 4"},
		{"--ranks-per-process", "-1", "at least 1 rank is needed"},
		{"--ranks-per-process", "1", "--gpu", "v100-16", "it is for CPU ranks"},
	} {
		r := command(slices.Concat([]string{"plan"}, args, c[:len(c)-1])...)
		require.Equal(t, cli.ExitBadInput, r.status)
		require.Contains(t, r.stderr, c[len(c)-1])
	}
}
