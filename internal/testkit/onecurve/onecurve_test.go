//go:build linux

package onecurve_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
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
	{"recompute full", "--recompute full"},
	{"optimizer on disk", "--offload optimizer=disk"},
	{"clipping", "--clip 0.3"},
	{"dropout", "--dropout 0.1"},
	{"lamb", "--optimizer lamb"},
	{"evaluation", "--eval-data " + testdata + "/text.bin --eval-every 1 --eval-steps 2"},
	{"bf16", "--precision bf16"},
	{"bf16, reduce fp32", "--precision bf16 --reduce fp32"},
	{"fp16", "--precision fp16"},
	{"8-bit moments", "--int8 optimizer"},
	{"int8 reduce", "--int8 reduce"},
	{"bf16, int8 gather and reduce", "--precision bf16 --int8 gather,reduce"},
	{"bf16, int8 activations and products", "--precision bf16 --int8 activations,matmul"},
	{"bf16 moments, stochastic rounding", "--precision bf16 --optimizer-dtype bf16 --stochastic-rounding"},
}

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
	if out, err := exec.Command("go", "build", "-o", path, "../../../cmd/spillway").CombinedOutput(); err != nil {
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
// planned.
func read(t *testing.T, metrics string) (c curve) {
	t.Helper()
	text, err := os.ReadFile(metrics)
	require.NoError(t, err)
	for line := range bytes.Lines(text) {
		var m map[string]json.RawMessage
		require.NoError(t, json.Unmarshal(line, &m))
		if m["event"] == nil {
			for _, space := range []string{"device", "host", "disk"} {
				require.Equal(t, string(m[space+"_planned_bytes"]), string(m[space+"_peak_bytes"]), space)
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

// A run over processes has the curve of one rank, at every number of ranks, stage and
// feature. Each transport takes features, ranks and stages in turn; all cells with SPILLWAY_LONG=all.
func TestOneCurveOverProcesses(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	want := map[string]curve{}
	for i, transport := range transports {
		t.Run(transport, func(t *testing.T) {
			available(t, transport)
			for f, feature := range features {
				for _, ranks := range []int{2, 3, 4} {
					for zero := range 4 {
						sampled := f >= 3 && f%3 == i && ranks == 2+(f/3+i)%3 && zero == (f+ranks)%4 && (f < 9 || f%2 == 0)
						if !long.All() && !sampled {
							continue
						}
						flags := append(strings.Fields(feature.flags), "--steps", "2", "--disk", filepath.Join(t.TempDir(), "disk"))
						if want[feature.name].sha == "" {
							want[feature.name] = read(t, job(t, "", 1, flags...))
						}
						got := read(t, job(t, transport, ranks, append(flags, "--zero", strconv.Itoa(zero))...))
						require.Equal(t, want[feature.name], got, "%s, %d ranks, stage %d", feature.name, ranks, zero)
					}
				}
			}
		})
	}
}

// A run that moves from 4 ranks to 3, to 8 and to 1 at random steps, each time over
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
		want := read(t, job(t, "", 1, append(given, "--steps", strconv.Itoa(steps))...))
		checkpoint, at := filepath.Join(t.TempDir(), "moved"), 0
		var got curve
		for i, leg := range []struct {
			transport string
			ranks     int
		}{{"launch", 4}, {"mpirun.openmpi", 3}, {"", 8}, {"mpirun.mpich", 1}} {
			available(t, leg.transport)
			if at += 1 + rng.IntN(2); i == 3 {
				at = steps
			}
			how := append(given, "--steps", strconv.Itoa(at), "--zero", strconv.Itoa((3+i)%4), "--checkpoint", checkpoint)
			if i > 0 {
				how = append(how, "--resume")
			}
			part := read(t, job(t, leg.transport, leg.ranks, how...))
			got.steps, got.sha = append(got.steps, part.steps...), part.sha
		}
		require.Equal(t, want, got, flags)
	}
}
