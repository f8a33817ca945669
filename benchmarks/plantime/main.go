// Command plantime compares the cost model with measured times. It calibrates the CPU device,
// predicts the step of every configuration of the grid, and measures it. Calibrations and
// measurements alternate, so that both have the same state of the machine. A prediction is the mean
// of two: with the calibrations before and after the measurement. It prints predicted and measured
// times with their errors.
//
//	go run ./benchmarks/plantime -csv FILE
package main

import (
	"context"
	"encoding/csv"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/benchmarks/bench"
	"github.com/spillway-ml/spillway/calibration"
	"github.com/spillway-ml/spillway/internal/testkit/grid"
	"github.com/spillway-ml/spillway/memplan/cost"
)

type options struct {
	rounds int
	only   string
	csv    string
	disk   string
	window time.Duration
	block  int
}

func main() {
	var o options
	flag.IntVar(&o.rounds, "rounds", 2, "times that the whole grid is measured")
	flag.StringVar(&o.only, "only", "", "only configurations whose line contains this `TEXT`")
	flag.StringVar(&o.csv, "csv", "", "write every prediction and measurement to `FILE`")
	flag.StringVar(&o.disk, "disk", os.TempDir(), "folder of the disk tier")
	flag.DurationVar(&o.window, "window", 200*time.Millisecond, "steps are timed for at least so long")
	flag.IntVar(&o.block, "block", 24, "configurations that are measured between two calibrations")
	flag.Parse()
	bench.Main("plantime", func() error {
		return bench.Scratch("", "plantime", func(dir string) error { return run(o, dir) })
	})
}

type point struct {
	grid.Point
	cfg     spillway.Config
	results []result // by round
}

type result struct {
	predicted, measured float64 // s
}

func run(o options, dir string) error {
	points, err := configurations(o, dir)
	if err != nil {
		return err
	}
	ctx := context.Background()
	began := time.Now()
	cal, err := o.calibrate(ctx)
	if err != nil {
		return err
	}
	calibrations := 1
	for range o.rounds {
		for from := 0; from < len(points); from += o.block {
			block := points[from:min(from+o.block, len(points))]
			for _, p := range block {
				if err := p.measure(ctx, o); err != nil {
					return fmt.Errorf("%s: %w", p, err)
				}
			}
			next, err := o.calibrate(ctx)
			if err != nil {
				return err
			}
			calibrations++
			for _, p := range block {
				if err := p.predict(cal, next); err != nil {
					return fmt.Errorf("%s: %w", p, err)
				}
			}
			cal = next
			if o.csv != "" { // the results so far
				if err := write(o.csv, points); err != nil {
					return err
				}
			}
			fmt.Fprintf(os.Stderr, "%.0f s\n", time.Since(began).Seconds())
		}
	}
	report(points)
	fmt.Printf("%d rounds, %d calibrations, %.0f s in all\n", o.rounds, calibrations, time.Since(began).Seconds())
	return nil
}

// configurations writes the grid's models and some tokens into dir.
func configurations(o options, dir string) ([]*point, error) {
	r := rand.New(rand.NewPCG(3, 4))
	tokens := make([]byte, 1<<17) // little-endian uint16 below 4,096
	for i := 0; i < len(tokens); i += 2 {
		tokens[i], tokens[i+1] = byte(r.IntN(256)), byte(r.IntN(16))
	}
	data := filepath.Join(dir, "tokens.bin")
	if err := os.WriteFile(data, tokens, 0o644); err != nil {
		return nil, err
	}
	folders := map[string]string{}
	for _, m := range grid.Timed {
		folder, err := m.Write(dir)
		if err != nil {
			return nil, err
		}
		folders[m.Name] = folder
	}
	disk, err := os.MkdirTemp(o.disk, "plantime-disk-")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(disk); err != nil { // a run creates and removes the folder
		return nil, err
	}
	var points []*point
	for _, g := range grid.Points() {
		if !strings.Contains(g.String(), o.only) {
			continue
		}
		m := g.ModelOf(grid.Timed)
		c := spillway.Default()
		c.Model, c.Data, c.Disk = folders[m.Name], data, disk
		c.Ranks, c.Zero, c.Recompute, c.Offload = g.Ranks, g.Zero, g.Recompute, g.Offload
		c.Batch, c.Seq, c.Steps = m.Batch, m.Seq, math.MaxInt32
		points = append(points, &point{Point: g, cfg: c})
	}
	return points, nil
}

func (o options) calibrate(ctx context.Context) (*cost.Calibration, error) {
	return calibration.Measure(ctx, calibration.Options{Disk: o.disk})
}

// predict adds the mean of the predictions with two calibrations, before and after the measurement.
func (p *point) predict(before, after *cost.Calibration) error {
	r := &p.results[len(p.results)-1]
	for _, cal := range []*cost.Calibration{before, after} {
		f, err := spillway.Predict(context.Background(), p.cfg, cal.Machine(p.cfg.Ranks))
		if err != nil {
			return err
		}
		r.predicted += f.Step.Seconds / 2
	}
	return nil
}

// measure times steps for o.window, and at least three. The first two steps, which touch the pages,
// are not counted.
func (p *point) measure(ctx context.Context, o options) (err error) {
	t, err := spillway.New(ctx, p.cfg)
	if err != nil {
		return err
	}
	defer func() {
		if e := t.Close(); err == nil {
			err = e
		}
	}()
	for range 2 {
		if _, err := t.Step(ctx); err != nil {
			return err
		}
	}
	start, steps := time.Now(), 0
	for time.Since(start) < o.window || steps < 3 {
		if _, err := t.Step(ctx); err != nil {
			return err
		}
		steps++
	}
	r := result{measured: time.Since(start).Seconds() / float64(steps)}
	p.results = append(p.results, r)
	return nil
}

// middle returns the medians over the rounds.
func (p *point) middle() (predicted, measured, e float64) {
	var a, b []float64
	for _, r := range p.results {
		a, b = append(a, r.predicted), append(b, r.measured)
	}
	predicted, measured = bench.Median(a), bench.Median(b)
	return predicted, measured, predicted/measured - 1
}

func report(points []*point) {
	var errs []float64
	worst := 0
	fmt.Printf("%-54s %12s %12s %8s\n", "", "predicted ms", "measured ms", "error")
	for i, p := range points {
		predicted, measured, e := p.middle()
		errs = append(errs, math.Abs(e))
		if errs[i] > errs[worst] {
			worst = i
		}
		fmt.Printf("%-54s %12.2f %12.2f %+7.1f%%\n", p, predicted*1e3, measured*1e3, e*100)
	}
	fmt.Println()
	for _, by := range []struct {
		name string
		of   func(p *point) string
	}{
		{"model", func(p *point) string { return p.Model }}, {"ranks", func(p *point) string { return fmt.Sprint(p.Ranks) }},
		{"stage", func(p *point) string { return fmt.Sprint(p.Zero) }}, {"recompute", func(p *point) string { return p.Recompute }},
		{"offload", func(p *point) string { return p.Tier() }},
	} {
		groups := map[string][]float64{}
		var names []string
		for i, p := range points {
			n := by.of(p)
			if groups[n] == nil {
				names = append(names, n)
			}
			groups[n] = append(groups[n], errs[i])
		}
		fmt.Printf("median error by %s:", by.name)
		for _, n := range names {
			fmt.Printf("  %s %.1f %%", n, bench.Median(groups[n])*100)
		}
		fmt.Println()
	}
	fmt.Printf("\nmedian error %.1f %% over %d configurations; worst %.1f %%: %s\n", bench.Median(errs)*100, len(points), errs[worst]*100, points[worst])
}

func write(path string, points []*point) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	w := csv.NewWriter(f)
	rows := [][]string{{"model", "ranks", "zero", "recompute", "offload", "round", "predicted_ms", "measured_ms", "error_percent"}}
	for _, p := range points {
		for i, r := range p.results {
			rows = append(rows, []string{p.Model, fmt.Sprint(p.Ranks), fmt.Sprint(p.Zero), p.Recompute, p.Tier(), fmt.Sprint(i + 1),
				fmt.Sprintf("%.3f", r.predicted*1e3), fmt.Sprintf("%.3f", r.measured*1e3), fmt.Sprintf("%+.1f", (r.predicted/r.measured-1)*100)})
		}
	}
	if err := w.WriteAll(rows); err != nil {
		return err
	}
	return f.Close()
}
