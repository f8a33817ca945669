package planning_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/planning"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/model"
)

// clusters are typical servers, for recommendations over the presets.
var clusters = []string{
	"--gpu rtx-4090 --nodes 1 --gpus-per-node 1", "--gpu rtx-3090 --nodes 1 --gpus-per-node 4", "--gpu v100-32 --nodes 1 --gpus-per-node 8",
	"--gpu a100-40 --nodes 2 --gpus-per-node 8", "--gpu a100-80 --nodes 8 --gpus-per-node 8", "--gpu l40s --nodes 1 --gpus-per-node 8",
	"--gpu h100-80 --nodes 1 --gpus-per-node 8", "--gpu h100-80 --nodes 16 --gpus-per-node 8", "--gpu h200-141 --nodes 1 --gpus-per-node 1",
	"--gpu b200-192 --nodes 64 --gpus-per-node 8",
}

// No recommendation and no way out uses more host memory than the servers have, or than the
// --node-memory that it requires. The test has four presets on one cluster each, and three layers
// too large for any plan there. SPILLWAY_LONG=all tests each preset on each cluster and runs for an
// hour.
func TestRecommendationsStayWithinTheirServers(t *testing.T) {
	t.Parallel()
	jobs := long.Sample(1, 2, [][2]string{{"gpt2-xl", clusters[0]}, {"llama-2-7b", clusters[1]}, {"llama-3-8b", clusters[3]}, {"gpt3-13b", clusters[5]}})
	if long.All() {
		jobs = nil
		for _, m := range model.Presets() {
			for _, cluster := range clusters {
				jobs = append(jobs, [2]string{m.Name, cluster})
			}
		}
	}
	jobs = append(jobs, [2]string{edited(t, "llama-tied", func(c map[string]any) {
		c["hidden_size"], c["intermediate_size"], c["num_attention_heads"], c["num_key_value_heads"] = 12288, 40960, 96, 8
		c["num_hidden_layers"], c["vocab_size"], c["max_position_embeddings"] = 3, 32000, 4096
	}), clusters[0]})
	fitted, ways, larger, hosts := 0, 0, 0, 0
	for _, job := range jobs {
		seq := 4096
		if m, err := model.LookupPreset(job[0]); err == nil {
			seq = min(m.Config.Positions, seq)
		}
		args := strings.Fields(fmt.Sprintf("--effort 200 --model %s %s --batch 1 --seq %d", job[0], job[1], seq))
		c, hw := asPlanned(t, args)
		card, err := gpus.Lookup(strings.Fields(job[1])[1])
		require.NoError(t, err)
		per := int64(c.LocalRanks)
		within := func(what string, f *spillway.Forecast, memory int64) {
			host := per * (f.Plan.Layout.Spaces[graph.Host].Peak + f.Plan.Config.Outside[graph.Host])
			if f.Plan.Layout.Spaces[graph.Host].Peak > 1<<30 {
				hosts++
			}
			require.LessOrEqual(t, host, memory, "%v: %s", args, what)
		}
		usual := per * gpus.ForRanks(card.Server().Memory)
		assumed := func(what string, f *spillway.Forecast) {
			within(what, f, usual)
			require.Zero(t, f.Plan.Config.Capacity[graph.Host], "%v: %s: an assumed cap is none of the plan's", args, what)
		}
		best, err := spillway.Fit(t.Context(), c, spillway.Fixed{}, 0, hw)
		if err == nil {
			fitted++
			assumed(cli.FlagText(best.Choices), best.Forecast)
			if card.Rates.BF16 > 0 {
				require.Contains(t, cli.FlagText(best.Choices), "--precision bf16", args)
			}
			continue
		}
		var none *spillway.NothingFits
		require.ErrorAs(t, err, &none, args)
		asked, err := spillway.Predict(t.Context(), c, hw.Machine(c.Ranks))
		require.NoError(t, err, args)
		list, _ := spillway.WaysOut(t.Context(), asked, hw)
		for _, way := range list {
			what := cli.FlagText(way.Changes)
			_, given, more := strings.Cut(what, "--node-memory ")
			switch {
			case more:
				memory, err := cli.ParseSize(strings.Fields(given)[0])
				require.NoError(t, err, what)
				require.Greater(t, memory, usual, what)
				within(what, way.Forecast, memory)
				larger++
			case way.Cost != "a larger GPU": // a larger GPU has other servers
				ways++
				assumed(what, way.Forecast)
			}
		}
	}
	require.GreaterOrEqual(t, fitted, 2)
	require.Positive(t, ways)
	require.Positive(t, larger, "some of them ask for larger servers")
	require.Positive(t, hosts, "some of them use the host")
}

// --node-memory caps the memory of all ranks of a server, and replaces the typical server's memory.
func TestNodeMemory(t *testing.T) {
	base := strings.Fields("plan --effort 1 --model gpt2 --offload optimizer=host --json -")
	type doc struct {
		Requested struct {
			Fits bool
			Host struct {
				CapacityBytes *int64 `json:"capacity_bytes"`
				PeakBytes     int64  `json:"peak_bytes"`
				OutsideBytes  int64  `json:"outside_bytes"`
			}
		}
		Server planning.Server
		Time   *planning.Time
	}
	read := func(more string) (d doc) {
		r := command(append(base, strings.Fields(more)...)...)
		require.Contains(t, []int{cli.ExitDone, cli.ExitDoesNotFit}, r.status, r.stderr)
		require.NoError(t, json.Unmarshal([]byte(r.stdout), &d))
		require.Equal(t, d.Server.Ranks*(d.Requested.Host.PeakBytes+d.Requested.Host.OutsideBytes), d.Server.HostBytes)
		return d
	}
	d := read("--ranks 4 --node-memory 4GB")
	require.Equal(t, int64(1e9), *d.Requested.Host.CapacityBytes)
	require.Equal(t, int64(4e9), d.Server.Memory)
	require.True(t, d.Requested.Fits)
	require.Nil(t, d.Time)
	require.False(t, read("--ranks 4 --node-memory 1GB").Requested.Fits)
	d = read("--ranks 4 --node-memory 4GB --host-memory 500MB")
	require.Equal(t, int64(500e6), *d.Requested.Host.CapacityBytes, "the smaller cap")
	d = read("--gpu h100-80 --nodes 2 --gpus-per-node 4 --node-memory 64GB")
	require.Equal(t, int64(16e9), *d.Requested.Host.CapacityBytes)
	require.Equal(t, int64(4), d.Server.Ranks)
	require.Empty(t, d.Server.Source)
	d = read("--gpu h100-80 --nodes 2 --gpus-per-node 4")
	require.Nil(t, d.Requested.Host.CapacityBytes, "what is usual caps only what is recommended")
	require.Equal(t, int64(4*256e9), d.Server.Memory)
	require.Contains(t, d.Server.Source, "DGX H100")
	require.Less(t, d.Time.Low, d.Time.High)
}

// bf16 is recommended if the card supports it; the report says so, or that the card does not.
func TestPrecisionOfRecommendations(t *testing.T) {
	text := unwrapped(command(strings.Fields("plan --effort 60 --model gpt2 --gpu a100-80")...).stdout)
	require.Regexp(t, `spillway train .* --zero 3 --precision bf16 `, strings.ReplaceAll(text, `\ `, ""))
	require.Contains(t, text, "in bf16, for whose products the device has units (16 × the rate of fp32)")
	require.Contains(t, text, "as requested means the defaults here: fp32 and rows of 256 tokens; as such models are trained: --precision bf16 --seq 1024")
	require.Contains(t, text, "The job fits here, with Spillway's plan. PyTorch FSDP took ")
	text = unwrapped(command(strings.Fields("plan --effort 60 --model gpt2 --gpu a100-80 --precision fp32 --seq 1024")...).stdout)
	require.NotContains(t, text, "bf16", "what was asked for stays")
	require.NotContains(t, text, "as requested means")
	for _, precision := range []string{"", " --precision bf16"} {
		text = unwrapped(command(strings.Fields("plan --effort 60 --model gpt2 --gpu v100-32" + precision)...).stdout)
		require.Contains(t, text, "v100-32 has no units for bf16", precision)
		require.NotContains(t, text, "planned only")
	}
	text = unwrapped(command(strings.Fields("plan --effort 60 --model gpt2 --gpu a100-80 --precision bf16 --int8 matmul")...).stdout)
	require.Contains(t, text, "--int8 is planned only: train refuses it with --device cuda")
	text = unwrapped(command(strings.Fields("plan --effort 60 --model gpt2 --gpu a100-80 --precision bf16 --optimizer-dtype bf16 --stochastic-rounding")...).stdout)
	require.Contains(t, text, "--optimizer-dtype bf16 is planned only: train refuses it")
}

// A search reports at least as much as a refusal: if it may not change a setting that would help,
// the error names the setting.
func TestFitTellsWhatARefusalTells(t *testing.T) {
	args := []string{"train", "--model", testdata + "/gpt2", "--data", testdata + "/text.bin", "--batch", "8", "--seq", "40", "--steps", "1", "--device-memory", "1200KiB"}
	plain, fit := command(args...), command(append(args, "--fit")...)
	require.Equal(t, cli.ExitDoesNotFit, plain.status)
	require.Equal(t, cli.ExitDoesNotFit, fit.status)
	require.Contains(t, plain.stderr, "--batch 1 --accum 8")
	require.Contains(t, fit.stderr, "nothing of ")
	require.Contains(t, fit.stderr, "--batch 1 --accum 8")
}

// A way out with more ranks shows the plan of its command, whose ranks fill their servers and share
// --node-memory.
func TestMoreRanksAreThoseOfTheirCommand(t *testing.T) {
	type stage struct {
		Fits         bool
		ProcessBytes int64 `json:"process_bytes"`
	}
	type doc struct {
		Requested stage
		Ways      []struct {
			Flags, Cost string
			Plan        stage
		}
	}
	for job, want := range map[string]int{
		"--model gpt2 --gpu t4-16 --seq 64 --device-memory 900MiB --node-memory 1GiB --effort 60": 0, // it fits with 16 GPUs, 2 per server
		"--model llama-2-7b --gpu a100-40 --node-memory 16GiB --effort 100":                       1,
	} {
		args := strings.Fields("plan --ranks 2 --batch 1 --precision fp32 --json - " + job)
		read := func(args []string) (d doc) {
			r := command(args...)
			require.NoError(t, json.Unmarshal([]byte(r.stdout), &d), r.stderr)
			return d
		}
		more := 0
		for _, way := range read(args).Ways {
			if strings.HasPrefix(way.Flags, "--ranks ") {
				more++
				require.Equal(t, way.Plan, read(cli.WithFlags(args, words(way.Flags))).Requested, way.Flags)
			}
			require.True(t, way.Plan.Fits)
		}
		require.Equal(t, want, more, job)
	}
}
