package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// stepKeys are exactly the fields of a step's line.
var stepKeys = []string{"step", "loss", "lr", "grad_norm", "loss_scale", "skipped", "seconds", "tokens_per_s",
	"device_peak_bytes", "device_planned_bytes", "host_peak_bytes", "host_planned_bytes", "disk_peak_bytes", "disk_planned_bytes",
	"comm_bytes", "disk_read_bytes", "disk_written_bytes", "comm_seconds", "comm_hidden_share", "data_wait_s", "model_flops_share", "rows", "targets",
	"accuracy", "noise_scale", "noise_scale_error", "noise_grad_square", "noise_trace"}

func keys(m map[string]any) (names []string) {
	for k := range m {
		names = append(names, k)
	}
	sort.Strings(names)
	return names
}

func TestMetrics(t *testing.T) {
	path := filepath.Join(t.TempDir(), "missing", "folder", "m.jsonl")
	got := command(tinyWith("--ranks", "3", "--metrics", path, "--steps", "4", "--eval-data", testdata+"/text.txt", "--eval-every", "2", "--eval-steps", "2", "--warmup", "2")...)
	require.Equal(t, 0, got.status, got.stderr)
	lines := readLines(t, path)
	require.Len(t, lines, 4+2+1)
	sort.Strings(stepKeys)
	step, evals := 0, 0
	for _, l := range lines[:6] {
		if l["event"] != nil {
			require.Equal(t, "eval", l["event"])
			require.EqualValues(t, step, l["step"], "an evaluation follows its step")
			require.IsType(t, 0.0, l["loss"])
			evals++
			continue
		}
		step++
		if share := l["model_flops_share"]; share != nil { // where a peak was measured
			require.Equal(t, share, l["mfu"])
			delete(l, "mfu")
		}
		require.Equal(t, stepKeys, keys(l))
		require.EqualValues(t, step, l["step"])
		require.EqualValues(t, 1, l["loss_scale"])
		require.EqualValues(t, 3, l["rows"])
		require.EqualValues(t, 3*16, l["targets"])
		require.Nil(t, l["noise_scale"], "without --reproducible")
		require.Nil(t, l["accuracy"], "targets are next tokens")
		require.Equal(t, false, l["skipped"])
		require.Positive(t, l["loss"])
		require.Positive(t, l["grad_norm"])
		require.Positive(t, l["seconds"])
		require.InEpsilon(t, 3*16/l["seconds"].(float64), l["tokens_per_s"], 1e-6, "tokens of all ranks")
		require.InEpsilon(t, 1e-3*min(1, float64(step)/2), l["lr"], 1e-12)
		require.Positive(t, l["comm_bytes"])
		for _, space := range []string{"device", "host", "disk"} {
			require.Len(t, l[space+"_peak_bytes"], 3, "one a rank")
			require.Len(t, l[space+"_planned_bytes"], 3)
		}
		if step == 4 { // an evaluation may touch the highest byte
			require.Equal(t, l["device_planned_bytes"], l["device_peak_bytes"])
			require.Equal(t, l["host_planned_bytes"], l["host_peak_bytes"])
		}
	}
	require.Equal(t, 2, evals)
	done := lines[6]
	require.Equal(t, "done", done["event"])
	require.Equal(t, shaOf(t, got.stdout), done["params_sha256"])

	// Truncated by the next run.
	got = command(tinyWith("--metrics", path, "--steps", "1")...)
	require.Equal(t, 0, got.status, got.stderr)
	require.Len(t, readLines(t, path), 2)
}

// The loss is the shortest decimal that round-trips a float32.
func TestLossIsShortest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.jsonl")
	got := command(tinyWith("--metrics", path)...)
	require.Equal(t, 0, got.status, got.stderr)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	for range 2 {
		var l map[string]any
		require.NoError(t, dec.Decode(&l))
		n := l["loss"].(json.Number)
		v, err := strconv.ParseFloat(n.String(), 32)
		require.NoError(t, err)
		require.Equal(t, strconv.FormatFloat(v, 'g', -1, 32), n.String())
	}
}

type traceFile struct {
	Events []traceEvent `json:"traceEvents"`
}

type traceEvent struct {
	Name     string
	Ph       string
	Pid, Tid int
	Ts, Dur  float64
	Cat      string
	Args     map[string]any
}

// A trace is a Chrome trace with a process for each rank and its streams. Spans of one stream are
// in order and do not overlap. At stage 3 with prefetch, an all-gather runs while the previous unit
// computes.
func TestTrace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "missing", "t.json")
	got := command("train", "--model", testdata+"/gpt2", "--data", testdata+"/text.bin", "--steps", "20", "--batch", "16", "--seq", "64",
		"--ranks", "2", "--prefetch", "1", "--trace", path)
	require.Equal(t, 0, got.status, got.stderr)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	var tr traceFile
	require.NoError(t, json.Unmarshal(text, &tr))
	streams := map[[2]int]string{}
	spans := map[[2]int][]traceEvent{}
	for _, e := range tr.Events {
		at := [2]int{e.Pid, e.Tid}
		switch {
		case e.Ph == "M" && e.Name == "thread_name":
			streams[at] = e.Args["name"].(string)
		case e.Ph == "X":
			require.GreaterOrEqual(t, e.Dur, 0.0)
			require.True(t, e.Name == "executor" || e.Args["kind"] != nil, "%+v", e) // an operation of the program, or a span of the executor
			spans[at] = append(spans[at], e)
		}
	}
	for rank := range 2 {
		byName := map[string][]traceEvent{}
		for at, name := range streams {
			if at[0] == rank {
				byName[name] = spans[at]
			}
		}
		compute, comm := byName["compute"], byName["comm"]
		require.NotEmpty(t, compute, "rank %d has streams %v", rank, streams)
		require.NotEmpty(t, comm, "rank %d has streams %v", rank, streams)
		require.NotEmpty(t, byName["copy-in"], "rank %d has streams %v", rank, streams)
		const slack = 0.002 // times are rounded to nanoseconds, in microseconds
		for _, stream := range byName {
			for i := 1; i < len(stream); i++ {
				require.GreaterOrEqual(t, stream[i].Ts+slack, stream[i-1].Ts+stream[i-1].Dur, "a stream runs one operation at a time")
			}
		}
		overlapped := 0
		for _, g := range comm {
			if g.Args["kind"] != "all_gather" {
				continue
			}
			for _, c := range compute {
				if c.Ts < g.Ts+g.Dur && g.Ts < c.Ts+c.Dur && c.Args["kind"] != nil && c.Args["kind"] != "join" {
					overlapped++
					break
				}
			}
		}
		require.Positive(t, overlapped, "no all-gather of rank %d ran behind computation", rank)
	}
}
