package calibration

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/grid"
	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/planner"
)

// TestCalibrationCoversTheGrid measures this machine and predicts every grid point. The calibration
// must hold a rate for each operation class. Each predicted step must be longer than Start, the
// measured time of a section outside its operations.
func TestCalibrationCoversTheGrid(t *testing.T) {
	if testing.Short() {
		t.Skip("measures for seconds")
	}
	cal, err := Measure(context.Background(), Options{Threads: 2, Disk: t.TempDir(), steps: 2})
	require.NoError(t, err)
	for _, class := range []cost.Class{"linear bf16", "linear f16", "linear i8", "linear_dw bf16", "attention_grad f16", "head_loss_grad bf16"} {
		require.Contains(t, cal.Rates, class)
	}
	require.Positive(t, cal.Start)
	dir := t.TempDir()
	for _, p := range grid.Points() {
		if (p.Recompute == "full") != (p.Model == "llama") {
			continue // full recomputation uses the same operation classes as the forward pass
		}
		c := config.Default()
		m := p.ModelOf(grid.Small)
		if c.Model, err = m.Write(dir); err != nil {
			t.Fatal(err)
		}
		c.Ranks, c.Zero, c.Recompute, c.Offload, c.Batch, c.Seq, c.Disk = p.Ranks, p.Zero, p.Recompute, p.Offload, m.Batch, m.Seq, dir
		f, err := planner.Predict(t.Context(), c, cal.Machine(p.Ranks))
		require.NoError(t, err, p)
		require.Greater(t, f.Step.Seconds, cal.Start, p)
		prog := f.Plan.Program
		for i := range f.Step.Trace.Steps {
			if op := f.Step.Trace.Op(i); op.Kind != graph.Join {
				require.Contains(t, cal.Rates, cost.ClassOf(prog, op), "%s: %s", p, op.Name)
			}
		}
	}
}

// TestWaitIsFound simulates a step with a known collective wait and passes its duration to addWait.
// addWait must recover the wait within 5 %.
func TestWaitIsFound(t *testing.T) {
	c := config.Default()
	m := grid.Small[0]
	var err error
	c.Model, err = m.Write(t.TempDir())
	require.NoError(t, err)
	c.Ranks, c.Zero, c.Batch, c.Seq = 2, 3, m.Batch, m.Seq
	machine := cost.CPU(2, 2)
	machine.Measured = map[cost.Class]cost.Rates{}
	for _, kind := range []cost.Class{"all_gather", "reduce_scatter", "all_reduce"} {
		rate := cost.Rate{PerOp: 1e-6}
		machine.Measured[kind] = cost.Rates{Alone: rate, Core: rate}
	}
	f, err := planner.Predict(t.Context(), c, machine)
	require.NoError(t, err)
	programs := []*graph.Program{f.Plan.Program}
	for _, wait := range []cost.Rate{{}, {PerOp: 1e-4}, {PerOp: 5e-3}, {PerOp: 1e-4, PerByte: 1e-8}} {
		waits, found := *machine, *machine
		waits.Wait, found.Wait.PerOp = wait, wait.PerOp
		run, err := cost.Simulate(programs[0], "step", &waits)
		require.NoError(t, err)
		part := waitParts[0]
		if wait.PerByte > 0 {
			part = waitParts[1]
		} else {
			found.Wait.PerOp = 0
		}
		require.NoError(t, addWait(programs, &found, part, run.Seconds))
		require.InDelta(t, wait.PerOp, found.Wait.PerOp, wait.PerOp/20)
		require.InDelta(t, wait.PerByte, found.Wait.PerByte, wait.PerByte/20)
	}
	found := *machine
	require.NoError(t, addWait(programs, &found, waitParts[0], f.Step.Seconds/2))
	require.Zero(t, found.Wait)
}

func TestKept(t *testing.T) {
	ownworld.Config(t, t.TempDir())
	c, note := Kept(2)
	require.Nil(t, c)
	require.Empty(t, note)

	_, err := KeepMemoryBandwidth(5e9)
	require.NoError(t, err)
	c, note = Kept(2)
	require.Nil(t, c, "memory alone is no calibration")
	require.NotContains(t, note, "stale")
	kept := cost.Fit(2, cost.Samples{Alone: []cost.Sample{{Class: "linear", Size: cost.Size{Flops: 1e6}, Seconds: 1e-3}}})
	path, err := Keep(kept)
	require.NoError(t, err)
	require.Equal(t, 5e9, MemoryBandwidth(), "one measurement does not lose the other")
	c, note = Kept(2)
	require.Equal(t, kept, c)
	require.Regexp(t, `^as calibrated on .+, \d{4}-\d{2}-\d{2}$`, note)
	hw, calibrated, _ := Hardware(2)
	require.True(t, calibrated)
	require.Equal(t, "cpu, calibrated", hw.Machine(1).Name)

	c, note = Kept(3)
	require.Nil(t, c)
	require.Contains(t, note, "stale: it is for 2 threads, not for 3")
	for _, s := range []struct {
		change func(*keptMachine)
		want   string
	}{
		{func(k *keptMachine) { k.Format++ }, "another version"},
		{func(k *keptMachine) { k.CPU = "Z80" }, `the processor was "Z80"`},
		{func(k *keptMachine) { k.SIMD = "mmx" }, "the SIMD level was mmx"},
		{func(k *keptMachine) { k.Measured = time.Now().Add(-100 * 24 * time.Hour) }, "it is of 20"},
	} {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		f, err := readCalibrations(path)
		require.NoError(t, err)
		k := f.Machines[machineName()]
		s.change(&k)
		f.Machines[machineName()] = k
		changed, err := json.Marshal(f)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(path, changed, 0o644))
		c, note = Kept(2)
		require.Nil(t, c)
		require.Contains(t, note, s.want)
		require.NoError(t, os.WriteFile(path, text, 0o644))
	}

	// Calibrations of other machines are kept. A damaged file is reported and measured again.
	f, err := readCalibrations(path)
	require.NoError(t, err)
	f.Machines = map[string]keptMachine{"another": {Calibration: kept}}
	text, err := json.Marshal(f)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, text, 0o644))
	c, _ = Kept(2)
	require.Nil(t, c)
	_, err = Keep(kept)
	require.NoError(t, err)
	f, err = readCalibrations(path)
	require.NoError(t, err)
	require.Len(t, f.Machines, 2)
	require.NoError(t, os.WriteFile(path, []byte("{"), 0o644))
	_, note = Kept(2)
	require.Contains(t, note, "can't be used")
	_, err = Keep(kept)
	require.NoError(t, err)
	c, _ = Kept(2)
	require.NotNil(t, c)

	ownworld.Config(t, filepath.Join(path, "below a file"))
	_, err = Keep(kept)
	require.ErrorContains(t, err, "keep the measurement: ")
}

// TestPeakOfAProcess checks that a process gets its fraction of the peak measured with the threads
// of all processes. A peak measured with the process's own thread count has priority.
func TestPeakOfAProcess(t *testing.T) {
	require.Zero(t, PeakOf(3, 4))
	keep := func(threads int, perS float64) {
		p := Peak{Threads: threads, CPU: CPUModel(), SIMD: level.Current().String(), At: time.Now(), PerS: perS}
		_, err := KeepPeak(p)
		require.NoError(t, err)
	}
	keep(12, 600)
	require.EqualValues(t, 600, PeakOf(12, 1))
	require.EqualValues(t, 600, PeakOf(12, 0), "processes here are unknown")
	require.EqualValues(t, 150, PeakOf(3, 4))
	require.Zero(t, PeakOf(3, 2), "of 6 threads none was measured")
	keep(3, 200)
	require.EqualValues(t, 200, PeakOf(3, 4))
}
