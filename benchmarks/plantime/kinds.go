package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/memplan/cost"
)

// printKinds runs a few steps with a trace and prints, by stream and kind of
// operation, what the model expects of one rank's step and what it took.
func (p *point) printKinds(ctx context.Context, cal *cost.Calibration, dir string) error {
	c := p.cfg
	c.Trace, c.Steps = filepath.Join(dir, "trace.json"), 8
	t, err := spillway.New(ctx, c)
	if err != nil {
		return err
	}
	var steps []float64
	if err := t.Run(ctx, func(r spillway.StepResult) error { steps = append(steps, r.Seconds); return nil }); err != nil {
		return err
	}
	if err := t.Close(); err != nil {
		return err
	}
	text, err := os.ReadFile(c.Trace)
	if err != nil {
		return err
	}
	var doc struct {
		TraceEvents []struct {
			Name, Ph string
			Tid      int
			Dur      float64 // µs
			Args     struct{ Kind, Section, Phase string }
		}
	}
	if err := json.Unmarshal(text, &doc); err != nil {
		return err
	}
	times := map[string][]float64{}
	for _, e := range doc.TraceEvents {
		if e.Ph == "X" && e.Args.Section == "step" {
			key := e.Args.Phase + "/" + e.Name
			times[key] = append(times[key], e.Dur/1e6)
		}
	}
	f, err := spillway.Predict(context.Background(), c, cal.Machine(c.Ranks))
	if err != nil {
		return err
	}
	type sum struct {
		calls         int
		expects, took float64
	}
	sums := map[string]*sum{}
	for i := range f.Step.Trace.Steps {
		at, op := f.Step.Trace.Steps[i], f.Step.Trace.Op(i)
		key := fmt.Sprintf("%-10s %s", op.Stream, op.Kind)
		if sums[key] == nil {
			sums[key] = &sum{}
		}
		s := sums[key]
		s.calls++
		s.expects += f.Step.End[i] - f.Step.Start[i]
		if all := times[f.Step.Trace.Section.Phases[at.Phase].Name+"/"+op.Name]; len(all) > 0 {
			s.took += median(all)
		}
	}
	var keys []string
	for k := range sums {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	fmt.Printf("\n%s: step predicted %.2f ms, median %.2f ms with a trace\n", p, f.Step.Seconds*1e3, median(steps[1:])*1e3)
	for _, k := range keys {
		s := sums[k]
		fmt.Printf("  %-32s %5d × %9.3f ms expected %9.3f ms took %+6.0f%%\n", k, s.calls, s.expects*1e3, s.took*1e3, (s.expects/s.took-1)*100)
	}
	return nil
}
