// Command plantime holds the cost model to the clock: it calibrates the CPU
// device, predicts the step of every configuration of the grid and measures it,
// in rounds (calibrate, then measure the whole grid) so that both meet the same
// machine, and prints predicted and measured times with their errors.
//
//	go run ./benchmarks/plantime -rounds 3 -csv FILE
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
	"slices"
	"strings"
	"time"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/internal/grid"
	"github.com/spillway-ml/spillway/memplan/cost"
)

type options struct {
	rounds int
	only   string
	csv    string
	disk   string
	window time.Duration
	kinds  bool
}

func main() {
	var o options
	flag.IntVar(&o.rounds, "rounds", 3, "times that everything is calibrated and measured")
	flag.StringVar(&o.only, "only", "", "only configurations whose line contains this `TEXT`")
	flag.StringVar(&o.csv, "csv", "", "write every prediction and measurement to `FILE`")
	flag.StringVar(&o.disk, "disk", os.TempDir(), "folder of the disk tier")
	flag.DurationVar(&o.window, "window", 200*time.Millisecond, "steps are timed together for at least so long")
	flag.BoolVar(&o.kinds, "kinds", false, "also print predicted and traced seconds by kind of operation")
	flag.Parse()
	if err := run(o); err != nil {
		fmt.Fprintln(os.Stderr, "plantime:", err)
		os.Exit(1)
	}
}

type point struct {
	grid.Point
	cfg     spillway.Config
	results []result // by round
}

type result struct {
	predicted, measured float64 // s
	windows             int     // that were timed undisturbed
}

func run(o options) error {
	dir, err := os.MkdirTemp("", "plantime-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	points, err := configurations(o, dir)
	if err != nil {
		return err
	}
	ctx := context.Background()
	began := time.Now()
	for round := range o.rounds {
		start := time.Now()
		cal, err := calibrate(ctx, o)
		if err != nil {
			return err
		}
		fmt.Printf("round %d: calibrated in %.1f s\n", round+1, time.Since(start).Seconds())
		for _, p := range points {
			r, err := p.meet(ctx, cal, o)
			if err != nil {
				return fmt.Errorf("%s: %w", p, err)
			}
			p.results = append(p.results, r)
			if o.kinds {
				if err := p.printKinds(ctx, cal, dir); err != nil {
					return err
				}
			}
		}
	}
	report(points)
	fmt.Printf("%.0f s in all\n", time.Since(began).Seconds())
	if o.csv == "" {
		return nil
	}
	return write(o.csv, points)
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
	if err := os.Remove(disk); err != nil { // a run makes it and removes it
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

// A window is disturbed if more than this share of the processors' time in it
// went elsewhere.
const disturbed = 0.04

// enough undisturbed windows end a measurement; so does patience.
const (
	enough   = 3
	patience = 6 * time.Second
)

// calibrate calibrates again, a few times at most, where others disturbed it.
func calibrate(ctx context.Context, o options) (best *cost.Calibration, err error) {
	least := math.Inf(1)
	for range 4 {
		before := lookAround()
		cal, err := spillway.Calibrate(ctx, 0, o.disk)
		if err != nil {
			return nil, err
		}
		share := lookAround().since(before)
		if share < least {
			best, least = cal, share
		}
		if least < disturbed {
			break
		}
	}
	if least >= disturbed {
		fmt.Printf("calibration was disturbed: others had %.0f %% of the processors\n", least*100)
	}
	return best, nil
}

// meet predicts and measures the configuration's step.
func (p *point) meet(ctx context.Context, cal *cost.Calibration, o options) (r result, err error) {
	f, err := spillway.Predict(p.cfg, cal.Machine(p.cfg.Ranks))
	if err != nil {
		return r, err
	}
	r.predicted = f.Step.Seconds
	t, err := spillway.New(ctx, p.cfg)
	if err != nil {
		return r, err
	}
	defer func() {
		if e := t.Close(); err == nil {
			err = e
		}
	}()
	for range 2 { // the first step touches the pages
		if _, err := t.Step(ctx); err != nil {
			return r, err
		}
	}
	type window struct{ seconds, share float64 }
	var all []window
	for began := time.Now(); r.windows < enough && time.Since(began) < patience; {
		before, start, steps := lookAround(), time.Now(), 0
		for time.Since(start) < o.window || steps < 2 {
			if _, err := t.Step(ctx); err != nil {
				return r, err
			}
			steps++
		}
		wall := time.Since(start).Seconds()
		w := window{wall / float64(steps), lookAround().since(before)}
		if all = append(all, w); w.share < disturbed {
			r.windows++
		}
	}
	// Those that were disturbed least.
	slices.SortStableFunc(all, func(a, b window) int {
		switch {
		case a.share < b.share:
			return -1
		case a.share > b.share:
			return 1
		}
		return 0
	})
	var seconds []float64
	for _, w := range all[:min(len(all), max(r.windows, 1))] {
		seconds = append(seconds, w.seconds)
	}
	r.measured = median(seconds)
	return r, nil
}

func (p *point) middle() (predicted, measured, e float64, windows int) {
	var a, b []float64
	for _, r := range p.results {
		a, b = append(a, r.predicted), append(b, r.measured)
		windows += r.windows
	}
	predicted, measured = median(a), median(b)
	return predicted, measured, predicted/measured - 1, windows
}

func report(points []*point) {
	var errs []float64
	worst := 0
	fmt.Printf("%-54s %12s %12s %8s %8s\n", "", "predicted ms", "measured ms", "error", "windows")
	for i, p := range points {
		predicted, measured, e, windows := p.middle()
		errs = append(errs, math.Abs(e))
		if errs[i] > errs[worst] {
			worst = i
		}
		fmt.Printf("%-54s %12.2f %12.2f %+7.1f%% %8d\n", p, predicted*1e3, measured*1e3, e*100, windows)
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
			fmt.Printf("  %s %.1f %%", n, median(groups[n])*100)
		}
		fmt.Println()
	}
	fmt.Printf("\nmedian error %.1f %% over %d configurations; worst %.1f %%: %s\n", median(errs)*100, len(points), errs[worst]*100, points[worst])
}

func write(path string, points []*point) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	w := csv.NewWriter(f)
	rows := [][]string{{"model", "ranks", "zero", "recompute", "offload", "round", "predicted_ms", "measured_ms", "error_percent", "windows"}}
	for _, p := range points {
		for i, r := range p.results {
			rows = append(rows, []string{p.Model, fmt.Sprint(p.Ranks), fmt.Sprint(p.Zero), p.Recompute, p.Tier(), fmt.Sprint(i + 1),
				fmt.Sprintf("%.3f", r.predicted*1e3), fmt.Sprintf("%.3f", r.measured*1e3), fmt.Sprintf("%+.1f", (r.predicted/r.measured-1)*100), fmt.Sprint(r.windows)})
		}
	}
	if err := w.WriteAll(rows); err != nil {
		return err
	}
	return f.Close()
}

func median(v []float64) float64 {
	s := slices.Clone(v)
	slices.Sort(s)
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}
