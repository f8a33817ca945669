package mixes_test

import (
	"bytes"
	"cmp"
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
	"syscall"
	"testing"
	"time"

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

const (
	testdata     = "../../../testdata"
	seedVariable = "SPILLWAY_TEST_SEED"
	// Comparisons of the default run and of SPILLWAY_LONG, and how often each feature
	// must be in one of the latter's.
	few, many, often = 4, 1000, 20
)

// transports are how ranks in processes of their own meet.
var transports = []string{"launch", "mpirun.openmpi", "mpirun.mpich"}

// folder has the command.
var folder string

// command is spillway, built once.
var command = sync.OnceValues(func() (path string, err error) {
	if folder, err = os.MkdirTemp("", "spillway-mixes-"); err != nil {
		return "", err
	}
	path = filepath.Join(folder, "spillway")
	if out, err := exec.Command("go", "build", "-ldflags=-w", "-o", path, "../../../cmd/spillway").CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return path, nil
})

// Two ways to compute a run under a random mix of features have the same losses,
// gradient norms and parameters: a few mixes, 200 with SPILLWAY_LONG=1, and 1,000 with
// SPILLWAY_LONG=all. Of these each feature is in at least 20. SPILLWAY_TEST_SEED repeats the mix that a
// failure prints.
func TestMixesHaveOneResult(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	first, cases := rand.Uint64()>>2, few
	if long.On() {
		first, cases = 1, long.Of(few, 200, many)
	}
	if text := os.Getenv(seedVariable); text != "" {
		seed, err := strconv.ParseUint(text, 10, 64)
		require.NoError(t, err, seedVariable)
		first, cases = seed, 1
	}
	counted, pairs := map[string]int{}, map[[2]string]bool{}
	compared := 0
	for seed := first; compared < cases; seed++ {
		m := draw(seed)
		if !available(m.second.transport) {
			continue
		}
		killed := compare(t, m)
		if t.Failed() {
			return
		}
		compared++
		m.features["elastic"] = killed
		for i, name := range features {
			if !m.features[name] {
				continue
			}
			counted[name]++
			for _, other := range features[:i] {
				if m.features[other] {
					pairs[[2]string{other, name}] = true
				}
			}
		}
		if compared%100 == 0 {
			t.Logf("%d comparisons: %v", compared, counted)
		}
	}
	t.Logf("%d comparisons: %v", compared, counted)
	for i, name := range features {
		for _, other := range features[:i] {
			if cases == many && !pairs[[2]string{other, name}] {
				t.Logf("not compared: %s with %s", other, name)
			}
		}
	}
	if cases == many {
		for _, name := range features {
			require.GreaterOrEqual(t, counted[name], often, name)
		}
	}
}

// available says whether a transport is installed. SPILLWAY_TEST_MPI says that all are.
func available(transport string) bool {
	if !strings.HasPrefix(transport, "mpirun") || os.Getenv("SPILLWAY_TEST_MPI") != "" {
		return true
	}
	_, err := exec.LookPath(transport)
	return err == nil
}

// curve is what a run computes, by step.
type curve struct {
	steps map[string]string
	sha   string
	roots map[int]string // of the states after a step, by the receipt
}

// compare runs a mix both ways. It tells whether the second lost a rank on its way.
func compare(t *testing.T, m *mix) (killed bool) {
	t.Helper()
	dir := t.TempDir()
	defer os.RemoveAll(dir)
	want, _ := m.run(t, m.first, filepath.Join(dir, "a"))
	got, killed := m.run(t, m.second, filepath.Join(dir, "b"))
	require.Equal(t, want, got, m.String())
	steps := m.steps
	if m.epochs > 0 && m.features["packing"] { // as many as the packed rows need
		steps = max(steps, len(want.steps))
	}
	require.Len(t, want.steps, steps, m.String())
	if m.features["receipt"] {
		require.Len(t, want.roots, steps+1, m.String())
		path, err := command()
		require.NoError(t, err)
		verify := exec.Command(path, "verify", filepath.Join(dir, "a", receiptName), "--threads", "1", "--prefetch", "0", "--disk", filepath.Join(dir, "disk"), "--offload", "optimizer=disk")
		out, err := verify.CombinedOutput()
		require.NoError(t, err, "%s\n%s: %s", m, verify, out)
		require.Contains(t, string(out), fmt.Sprintf("run again and equal: %[1]d of %[1]d steps", steps))
	}
	return killed
}

// run runs a mix one way.
func (m *mix) run(t *testing.T, w way, dir string) (c curve, killed bool) {
	t.Helper()
	require.NoError(t, os.MkdirAll(dir, 0o755))
	metrics := filepath.Join(dir, "metrics.jsonl")
	model, data, seq := testdata+"/"+m.model, testdata+"/text.bin", 8
	switch {
	case m.features["packing"]:
		model, data, seq = filepath.Join(dir, "model"), filepath.Join(dir, "chat.jsonl"), 64
		m.conversations(t, model, data)
	case m.rows > 0: // short epochs, so that the cache is read
		text, err := os.ReadFile(data)
		require.NoError(t, err)
		data = filepath.Join(dir, "rows.bin")
		require.NoError(t, os.WriteFile(data, text[:2*(m.rows*seq+1)], 0o644))
	}
	rows := []string{"--global-batch", strconv.Itoa(m.step)}
	if m.schedule != "" {
		rows = []string{"--batch-schedule", m.schedule}
	}
	flags := append([]string{"--model", model, "--data", data, "--batch", strconv.Itoa(m.batch), "--seq", strconv.Itoa(seq), "--threads", "1",
		"--metrics", metrics, "--disk", filepath.Join(dir, "disk")}, m.flags...)
	flags = slices.Concat(flags, rows, w.flags)
	if m.features["receipt"] {
		flags = append(flags, "--receipt", filepath.Join(dir, receiptName), "--receipt-every", "1")
	}
	first := flags
	if w.shares != "" {
		first = append(slices.Clone(flags), "--rank-shares", w.shares)
	}
	switch {
	case w.kill:
		killed = m.elastic(t, w, slices.Concat(flags, m.length(), []string{"--checkpoint", filepath.Join(dir, "saved"), "--save-every", "2"}), metrics)
	case w.resumeAt > 0:
		flags = append(flags, "--checkpoint", filepath.Join(dir, "saved"))
		m.job(t, w.transport, w.ranks, append(first, "--checkpoint", filepath.Join(dir, "saved"), "--steps", strconv.Itoa(w.resumeAt))...)
		m.job(t, w.transport, w.after, append(slices.Concat(flags, m.length()), "--resume")...)
	default:
		m.job(t, w.transport, w.ranks, slices.Concat(first, m.length())...)
	}
	c = m.read(t, w, metrics)
	if m.features["receipt"] {
		c.roots = rootsOf(t, filepath.Join(dir, receiptName))
	}
	return c, killed
}

// conversations writes the model with an end token, and conversations of 24 tokens and more, of
// which some fit into no row of 64.
func (m *mix) conversations(t *testing.T, model, data string) {
	t.Helper()
	text, err := os.ReadFile(testdata + "/" + m.model + "/config.json")
	require.NoError(t, err)
	text = bytes.Replace(text, []byte(`"vocab_size": 256`), []byte(`"vocab_size": 257`), 1)
	require.NoError(t, os.MkdirAll(model, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(model, "config.json"), text, 0o644))
	var lines strings.Builder
	n := cmp.Or(2*m.rows, 100)
	if m.epochs > 0 { // at least m.rows packed rows
		n *= 2
	}
	for i := range n {
		fmt.Fprintf(&lines, `{"prompt": "%d", "response": "%s"}`+"\n", i, strings.Repeat("ab", 1+i*7%23))
	}
	require.NoError(t, os.WriteFile(data, []byte(lines.String()), 0o644))
}

const receiptName = "receipt.jsonl"

// rootsOf are the hashes of the states after each step.
func rootsOf(t *testing.T, path string) map[int]string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	roots := map[int]string{}
	for line := range bytes.Lines(text) {
		var v struct {
			Step int
			Root string
		}
		require.NoError(t, json.Unmarshal(line, &v))
		roots[v.Step] = v.Root
	}
	return roots
}

// process is a command that starts train with flags over so many ranks.
func (m *mix) process(t *testing.T, transport string, ranks int, flags ...string) *exec.Cmd {
	t.Helper()
	path, err := command()
	require.NoError(t, err)
	train := append([]string{"train"}, flags...)
	switch transport {
	case "":
		return exec.Command(path, append(train, "--ranks", strconv.Itoa(ranks))...)
	case "launch":
		return exec.Command(path, append([]string{"launch", "-n", strconv.Itoa(ranks), "--"}, train...)...)
	}
	line := []string{"-np", strconv.Itoa(ranks)}
	if transport == "mpirun.openmpi" {
		line = append(line, "--oversubscribe")
		if os.Geteuid() == 0 {
			line = append(line, "--allow-run-as-root")
		}
	}
	return exec.Command(transport, append(append(line, path), train...)...)
}

func (m *mix) job(t *testing.T, transport string, ranks int, flags ...string) {
	t.Helper()
	cmd := m.process(t, transport, ranks, flags...)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s\n%s: %s", m, cmd, out)
}

// elastic runs a job that loses one of its ranks, if that comes in time.
func (m *mix) elastic(t *testing.T, w way, flags []string, metrics string) (killed bool) {
	t.Helper()
	path, err := command()
	require.NoError(t, err)
	cmd := exec.Command(path, append([]string{"launch", "-n", strconv.Itoa(w.ranks), "--restarts", "1", "--min-ranks", "1", "--", "train"}, flags...)...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	require.NoError(t, cmd.Start())
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			require.NoError(t, err, "%s\n%s: %s", m, cmd, out.String())
			return killed && strings.Contains(out.String(), "lost rank")
		case <-tick.C:
		}
		if killed {
			continue
		}
		if text, err := os.ReadFile(metrics); err != nil || bytes.Count(text, []byte("\n")) < 3 {
			continue
		}
		if pids := children(cmd.Process.Pid); len(pids) > 0 {
			pid, err := strconv.Atoi(pids[int(m.seed%uint64(len(pids)))])
			require.NoError(t, err)
			killed = syscall.Kill(pid, syscall.SIGKILL) == nil
		}
	}
}

// children lists the processes that any thread of a process has started.
func children(pid int) (pids []string) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid)) // the pattern is sound
	for _, f := range files {
		if text, err := os.ReadFile(f); err == nil { // or the thread has ended
			pids = append(pids, strings.Fields(string(text))...)
		}
	}
	return pids
}

// touched compares the bytes that each rank has touched by the end of a step with its plan, and
// reports whether they are equal. Without a batch schedule they must be. With one, a smaller step may
// need more of a space than a larger one, so a step may touch less than the plan. Ranks with fewer
// micro-batches than others touch less too, in layer order or with a schedule.
func (m *mix) touched(t *testing.T, step int, planned, peak json.RawMessage) (all bool) {
	t.Helper()
	if m.schedule == "" && (!m.features["layer order"] || !m.features["uneven shares"]) {
		require.Equal(t, string(planned), string(peak), "%s: step %d", m, step)
		return true
	}
	var want, got []int64
	require.NoError(t, errors.Join(json.Unmarshal(planned, &want), json.Unmarshal(peak, &got)))
	require.Len(t, got, len(want))
	if m.schedule == "" {
		require.Equal(t, slices.Max(want), slices.Max(got), "%s: step %d", m, step)
	}
	for rank := range got {
		require.LessOrEqual(t, got[rank], want[rank], "%s: step %d, rank %d", m, step, rank)
	}
	if !m.features["uneven shares"] {
		return slices.Equal(want, got)
	}
	return slices.Max(want) == slices.Max(got)
}

// read returns the curve of a file of metrics. A step that was run twice must have the same values.
// A run that was not interrupted must touch all memory of its plan by its end.
func (m *mix) read(t *testing.T, w way, metrics string) curve {
	t.Helper()
	text, err := os.ReadFile(metrics)
	require.NoError(t, err)
	c, all := curve{steps: map[string]string{}}, map[string]bool{}
	for line := range bytes.Lines(text) {
		var v map[string]json.RawMessage
		require.NoError(t, json.Unmarshal(line, &v), "%s", m)
		if sha := v["params_sha256"]; sha != nil {
			c.sha = string(sha)
			continue
		}
		if v["event"] != nil {
			continue
		}
		step, now := string(v["step"]), fmt.Sprintf("%s %s %s", v["loss"], v["grad_norm"], v["skipped"])
		if before, ok := c.steps[step]; ok {
			require.Equal(t, before, now, "%s: step %s, run again", m, step)
		}
		c.steps[step] = now
		number, err := strconv.Atoi(step)
		require.NoError(t, err)
		for _, space := range []string{"device", "host", "disk"} {
			all[space] = m.touched(t, number, v[space+"_planned_bytes"], v[space+"_peak_bytes"]) || all[space]
		}
	}
	require.NotEmpty(t, c.sha, m.String())
	if w.resumeAt == 0 && !w.kill { // it has all steps at one number of ranks
		require.Equal(t, map[string]bool{"device": true, "host": true, "disk": true}, all, m.String())
	}
	return c
}
