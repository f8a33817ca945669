//go:build linux

package onecurve_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
)

func TestMain(m *testing.M) {
	code := ownworld.Run(m)
	if folder != "" {
		_ = os.RemoveAll(folder)
	}
	os.Exit(code)
}

const testdata = "../../../testdata"

// leaves is the micro-batches of a step.
const leaves = 24

var features = []struct{ name, flags string }{
	{"plain", ""},
	{"clipping", "--clip 0.3"},
	{"dropout", "--dropout 0.1"},
	{"lamb", "--optimizer lamb"},
	{"muon", "--optimizer muon"},
	{"evaluation", "--eval-data " + testdata + "/text.bin --eval-every 1 --eval-steps 2"},
	{"bf16", "--precision bf16"},
	{"bf16, reduce fp32", "--precision bf16 --reduce fp32"},
	{"fp16", "--precision fp16"},
	{"fp16, the first step overflows", "--precision fp16 --lr 1e-2 --loss-scale 1400000"},
	{"8-bit moments", "--int8 optimizer"},
	{"int8 reduce", "--int8 reduce"},
	{"bf16, int8 gather and reduce", "--precision bf16 --int8 gather,reduce"},
	{"bf16, int8 activations and products", "--precision bf16 --int8 activations,matmul"},
	{"bf16 moments, stochastic rounding", "--precision bf16 --optimizer-dtype bf16 --stochastic-rounding"},
	{"padding", "--batch 2 --global-batch 47"},
	{layered, "--model " + testdata + "/llama-untied"},
}

// layered is the feature that may run in layer order: its head is not tied.
const layered = "llama, untied"

// transports are how ranks in processes of their own meet.
var transports = []string{"launch", "mpirun.openmpi", "mpirun.mpich"}

// folder has the command.
var folder string

// command is spillway, built once.
var command = sync.OnceValues(func() (path string, err error) {
	if folder, err = os.MkdirTemp("", "spillway-onecurve-"); err != nil {
		return "", err
	}
	path = filepath.Join(folder, "spillway")
	if out, err := exec.Command("go", "build", "-ldflags=-w", "-o", path, "../../../cmd/spillway").CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return path, nil
})

// job runs train with the flags on so many ranks: in one process, or a process each.
func job(t *testing.T, transport string, ranks int, flags ...string) (metrics string) {
	t.Helper()
	path, err := command()
	require.NoError(t, err)
	metrics = filepath.Join(t.TempDir(), "metrics.jsonl")
	train := append([]string{"train", "--model", testdata + "/gpt2", "--data", testdata + "/text.bin", "--batch", "1", "--seq", "8", "--threads", "1",
		"--reproducible", "--global-batch", strconv.Itoa(leaves), "--metrics", metrics}, flags...)
	var cmd *exec.Cmd
	switch transport {
	case "":
		cmd = exec.Command(path, append(train, "--ranks", strconv.Itoa(ranks))...)
	case "launch":
		cmd = exec.Command(path, append([]string{"launch", "-n", strconv.Itoa(ranks), "--"}, train...)...)
	default:
		line := []string{"-np", strconv.Itoa(ranks)}
		if transport == "mpirun.openmpi" {
			line = append(line, "--oversubscribe")
			if os.Geteuid() == 0 {
				line = append(line, "--allow-run-as-root")
			}
		}
		cmd = exec.Command(transport, append(append(line, path), train...)...)
	}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s: %s", cmd, out)
	return metrics
}

// curve is what a run computes: its losses, norms, evaluations and parameters.
type curve struct {
	steps []string
	sha   string
}

// read takes the curve from a file of metrics, of which every step touched what was
// planned; of so many ranks with fewer micro-batches than others, in layer order, at most
// that.
func read(t *testing.T, metrics string, fewer int) (c curve) {
	t.Helper()
	text, err := os.ReadFile(metrics)
	require.NoError(t, err)
	for line := range bytes.Lines(text) {
		var m map[string]json.RawMessage
		require.NoError(t, json.Unmarshal(line, &m))
		if m["event"] == nil {
			for _, space := range []string{"device", "host", "disk"} {
				var planned, peak []int64
				require.NoError(t, errors.Join(json.Unmarshal(m[space+"_planned_bytes"], &planned), json.Unmarshal(m[space+"_peak_bytes"], &peak)))
				if fewer == 0 {
					require.Equal(t, planned, peak, space)
				}
				require.Equal(t, slices.Max(planned), slices.Max(peak), space)
				require.LessOrEqual(t, slices.Max(peak), slices.Min(planned), space)
			}
		}
		if sha := m["params_sha256"]; sha != nil {
			c.sha = string(sha)
			continue
		}
		c.steps = append(c.steps, fmt.Sprintf("%s %s %s %s", m["step"], m["event"], m["loss"], m["grad_norm"]))
	}
	require.NotEmpty(t, c.sha)
	return c
}

// available skips a transport that is not installed: CI has them all, and says so.
func available(t *testing.T, transport string) {
	t.Helper()
	if transport == "" || transport == "launch" {
		return // the command itself
	}
	if _, err := exec.LookPath(transport); err != nil && os.Getenv("SPILLWAY_TEST_MPI") == "" {
		t.Skipf("%s is not installed", transport)
	}
}

// A run has the curve of one rank at every number of ranks, with any shares, at every
// stage and with any recomputation and placement, in one process and over processes. Each
// way to meet takes two draws, with SPILLWAY_LONG=all 60. SPILLWAY_TEST_SEED repeats the seed
// that a failure prints.
func TestOneCurveWithAnyShares(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	seed, draws := rand.Uint64()>>1, 2
	if text := os.Getenv("SPILLWAY_TEST_SEED"); text != "" {
		var err error
		seed, err = strconv.ParseUint(text, 10, 64)
		require.NoError(t, err)
	}
	draws = long.Of(draws, 20, 60)
	t.Logf("SPILLWAY_TEST_SEED=%d", seed)
	want := map[string]curve{}
	for i, transport := range append([]string{""}, transports...) {
		t.Run("over "+transport, func(t *testing.T) {
			available(t, transport)
			r := rand.New(rand.NewPCG(seed, uint64(i)))
			for k := range draws {
				feature := features[(i+k*len(transports)+k)%len(features)]
				flags := append(strings.Fields(feature.flags), "--steps", "2", "--checkpoint", "none")
				if want[feature.name].sha == "" {
					want[feature.name] = read(t, job(t, "", 1, flags...), 0)
				}
				ranks := 2 + r.IntN(long.Or(3, 5))
				switch {
				case transport == "":
					ranks = 2 + r.IntN(leaves-1)
				case long.On() && k%10 == 0:
					ranks = 8 + r.IntN(9)
				}
				how := append(draw(r, ranks), "--disk", filepath.Join(t.TempDir(), "disk"))
				fewer := 0
				if feature.name == layered && r.IntN(2) == 0 {
					how = append(how, "--accum-order", "layer")
					fewer = ranks
				}
				got := read(t, job(t, transport, ranks, append(flags, how...)...), fewer)
				require.Equal(t, want[feature.name], got, "SPILLWAY_TEST_SEED=%d, draw %d: %s, %d ranks: %s", seed, k, feature.name, ranks, how)
			}
		})
	}
}

// draw is a way to compute a run, which changes no bit.
func draw(r *rand.Rand, ranks int) []string {
	pick := func(names ...string) string { return names[r.IntN(len(names))] }
	how := []string{"--zero", strconv.Itoa(r.IntN(4)), "--recompute", pick("none", "selective", "full"), "--prefetch", strconv.Itoa(r.IntN(3)),
		"--offload", pick("none", "optimizer=host", "parameters=host,gradients=host", "optimizer=disk,activations=host")}
	if r.IntN(2) == 0 {
		return how
	}
	shares := make([]int, ranks)
	for i := range leaves {
		if i < ranks {
			shares[i]++
		} else {
			shares[r.IntN(ranks)]++
		}
	}
	return append(how, "--rank-shares", strings.Trim(strings.ReplaceAll(fmt.Sprint(shares), " ", ","), "[]"))
}

// A run that moves from 4 ranks to 5, to 7 and to 1 at random steps, each time over
// another transport, ends in the parameters of one rank.
func TestOneCurveMovesBetweenTransports(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	rng := rand.New(rand.NewPCG(4, 38))
	for _, flags := range []string{"--clip 0.5 --dropout 0.1", "--precision bf16", "--precision fp16", "--int8 reduce,optimizer"} {
		if !long.All() && !strings.Contains(flags, "int8") {
			continue
		}
		const steps = 6
		given := strings.Fields(flags)
		want := read(t, job(t, "", 1, append(given, "--steps", strconv.Itoa(steps))...), 0)
		checkpoint, at := filepath.Join(t.TempDir(), "moved"), 0
		var got curve
		for i, leg := range []struct {
			transport string
			ranks     int
		}{{"launch", 4}, {"mpirun.openmpi", 5}, {"", 7}, {"mpirun.mpich", 1}} {
			available(t, leg.transport)
			if at += 1 + rng.IntN(2); i == 3 {
				at = steps
			}
			how := append(given, "--steps", strconv.Itoa(at), "--zero", strconv.Itoa((3+i)%4), "--checkpoint", checkpoint)
			if i > 0 {
				how = append(how, "--resume")
			}
			part := read(t, job(t, leg.transport, leg.ranks, how...), 0)
			got.steps, got.sha = append(got.steps, part.steps...), part.sha
		}
		require.Equal(t, want, got, flags)
	}
}
