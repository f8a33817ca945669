// Command plan-as-data reads plans in a program. It plans a model for each ZeRO stage without its
// weights, and prints the contents of a rank's memory at the peak, by class, and the number of
// collectives of a step. Then it looks for changes that make stage 0 fit into a third of the memory
// that it needs.
//
//	go run ./examples/plan-as-data [MODEL]
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

func main() {
	c := spillway.Default()
	c.Model = "gpt2"
	if len(os.Args) > 1 {
		c.Model = os.Args[1]
	}
	c.Ranks, c.Batch, c.Seq = 4, 1, 256
	if err := run(context.Background(), c); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, c spillway.Config) error {
	hw := spillway.CPUHardware(8)
	var most *spillway.Forecast
	for c.Zero = range 4 {
		f, err := spillway.Predict(ctx, c, hw.Machine(c.Ranks))
		if err != nil {
			return err
		}
		if most == nil {
			most = f
		}
		fmt.Printf("stage %d: %s a rank, %.3g s a step; at the peak, in %s:\n%s", c.Zero, plan.Bytes(peak(f)), f.Step.Seconds,
			f.Plan.Layout.Spaces[graph.Device].PeakAt, classes(f))
		fmt.Printf("  sends: %s\n", strings.Join(collectives(f.Plan.Program), ", "))
	}
	c.DeviceMemory = peak(most) / 3 // a device with a third of the memory that stage 0 needs
	refused, err := spillway.Predict(ctx, with(c, 0), hw.Machine(c.Ranks))
	if err != nil {
		return err
	}
	ways, _ := spillway.WaysOut(ctx, refused, hw)
	for _, w := range ways {
		fmt.Printf("stage 0 within %s: stage %d, %q, at %.2f × the time\n", plan.Bytes(c.DeviceMemory), w.Forecast.Config.Zero, w.Forecast.Config.Offload, w.Slowdown)
	}
	if _, err := spillway.Build(ctx, with(c, 0)); !errors.Is(err, spillway.ErrDoesNotFit) {
		return fmt.Errorf("a third of its memory is enough for stage 0: %v", err)
	}
	return nil
}

func with(c spillway.Config, stage int) spillway.Config {
	c.Zero = stage
	return c
}

func peak(f *spillway.Forecast) int64 { return f.Plan.Layout.Spaces[graph.Device].Peak }

// classes lists the bytes that are live at the peak, by class.
func classes(f *spillway.Forecast) (text string) {
	for class, n := range f.Plan.Layout.Spaces[graph.Device].ByClass {
		if n > 0 {
			text += fmt.Sprintf("  %-14s %s\n", graph.Class(class), plan.Bytes(n))
		}
	}
	return text
}

// collectives counts the collectives of a step.
func collectives(p *graph.Program) (list []string) {
	count := map[graph.Kind]int{}
	for _, ph := range p.SectionOf(graph.SectionStep, graph.FormWhole).Phases {
		for i := range ph.Ops {
			if k := ph.Ops[i].Kind; slices.Contains([]graph.Kind{graph.AllGather, graph.ReduceScatter, graph.AllReduce}, k) {
				count[k]++
			}
		}
	}
	for k, n := range count {
		list = append(list, fmt.Sprintf("%d × %s", n, k))
	}
	slices.Sort(list)
	return list
}
