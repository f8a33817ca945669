package fsdp_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/layouts"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/zero"
)

// The golden files list, for one small model at each stage, the step's operations in one column per
// stream and the lifetime of every device buffer. A change of a file changes every run, so review
// it as such; -rewrite accepts it.
func TestGoldenPrograms(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd != "step" {
				d.Fatalf(t, "unknown command %q", d.Cmd)
			}
			var stage, ranks, prefetch int
			accum, freeze := 1, ""
			d.ScanArgs(t, "zero", &stage)
			d.ScanArgs(t, "ranks", &ranks)
			d.ScanArgs(t, "prefetch", &prefetch)
			if d.HasArg("accum") {
				d.ScanArgs(t, "accum", &accum)
			}
			if d.HasArg("freeze") {
				d.ScanArgs(t, "freeze", &freeze)
			}
			cfg := plan.Config{Ranks: ranks, Stage: zero.Stage(stage), Prefetch: prefetch, Accum: accum, Clip: 1}
			if freeze != "" {
				cfg.Freeze = []string{freeze}
			}
			c := model.Config{Family: model.GPT2, Layers: 1, Width: 16, Heads: 2, Vocab: 20, Positions: 8, TiedHead: true}
			p := buildPlan(t, c, cfg)
			return operations(p.Program) + bars(t, p)
		})
	})
}

// operations lists the operations of section "step", each in the column of its stream.
func operations(p *graph.Program) string {
	var b strings.Builder
	for _, ph := range p.Section("step").Phases {
		fmt.Fprintf(&b, "%s ×%d\n", ph.Name, ph.Repeat)
		for _, op := range ph.Ops {
			line := strings.Repeat(" ", 2+28*int(op.Stream)) + op.Name
			for _, e := range op.Wait {
				line += fmt.Sprintf(" ←%d", e)
			}
			if op.Record != 0 {
				line += fmt.Sprintf(" →%d", op.Record)
			}
			fmt.Fprintln(&b, line)
		}
	}
	return b.String()
}

// bars draws the lifetimes of the device's buffers in section "step".
func bars(t *testing.T, p *plan.Plan) string {
	var all bytes.Buffer
	require.NoError(t, layouts.Bars(p.Program, p.Layout, &all))
	var out strings.Builder
	keep, space := false, false
	for _, line := range strings.SplitAfter(all.String(), "\n") {
		switch {
		case line == "":
		case line[0] != ' ':
			space = strings.HasPrefix(line, "device")
			keep = space
		case strings.HasPrefix(line, "  ") && line[2] != ' ':
			keep = space && strings.HasPrefix(line, "  step:")
			if keep { // the operations are listed already
				line = "  step\n"
			}
		}
		if keep {
			out.WriteString(line)
		}
	}
	return out.String()
}
