// Command published predicts every run of internal/published/rows.csv with the planner's rates. It
// writes one line for each to predicted.csv beside it, and prints the tables of
// benchmarks/published/README.md. If rows have no role, it only draws their roles.
//
// usage: go run ./benchmarks/published        (at the root of the repository)
package main

import (
	"context"
	"encoding/csv"
	"fmt"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/benchmarks/bench"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/internal/published"
)

const (
	rowsFile      = "internal/published/rows.csv"
	predictedFile = "internal/published/predicted.csv"
)

func main() { bench.Main("published", run) }

func run() error {
	records, err := read()
	if err != nil {
		return err
	}
	if draw(records) {
		return write(records)
	}
	rows, err := published.Parse(records, strings.Repeat("1 1 1 1 0 0\n", len(records)-1))
	if err != nil {
		return err
	}
	models, err := os.MkdirTemp("", "published")
	if err != nil {
		return err
	}
	defer os.RemoveAll(models)
	var out strings.Builder
	for i := range rows {
		if rows[i].Here, err = predict(&rows[i], models); err != nil {
			return fmt.Errorf("row %d: %w", i+1, err)
		}
		fmt.Fprintln(&out, rows[i].Here)
	}

	if err := os.WriteFile(predictedFile, []byte(out.String()), 0o644); err != nil {
		return err
	}
	table(rows)
	return nil
}

// read returns the current records of the file, which may be newer than those in the program.
func read() ([][]string, error) {
	f, err := os.Open(rowsFile)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return csv.NewReader(f).ReadAll()
}

// write stores the records with the drawn roles.
func write(records [][]string) error {
	var out strings.Builder
	w := csv.NewWriter(&out)
	if err := w.WriteAll(records); err != nil {
		return err
	}
	fmt.Println("roles were drawn; commit the rows before the next run, which predicts them")
	return os.WriteFile(rowsFile, []byte(out.String()), 0o644)
}

// predict plans a row's job.
func predict(r *published.Row, models string) (here published.Prediction, err error) {
	g, err := gpus.Lookup(r.Card)
	if err != nil {
		return here, err
	}
	if r.Network > 0 {
		g.Network = r.Network * 1e9 / 8
	}
	c := spillway.Default()
	if c.Model, err = modelOf(r, models); err != nil {
		return here, err
	}
	c.Ranks, c.ShardSize, c.Seq, c.Batch, c.Accum, c.Zero = r.Ranks, r.Shard, r.Seq, r.Batch, r.Accum, r.Zero
	c.Tensor, c.Pipeline = r.Tensor, r.Pipeline
	c.Precision, c.Recompute, c.Offload, c.Reduce = "bf16", r.Recompute, r.Offload, r.Reduce
	c.Outside[graph.Device], c.Outside[graph.Host] = g.OutsideBytes(), gpus.HostOutsideBytes
	c.Target, c.LocalRanks = graph.CUDATarget(), r.Node
	f, err := spillway.Predict(context.Background(), c, g.Machine(min(r.Node, r.Ranks)))
	if err != nil {
		return here, err
	}
	use := func(sp graph.Space) float64 {
		return float64(f.Plan.Layout.Spaces[sp].Peak + f.Plan.Config.Outside[sp])
	}
	return published.Prediction{
		TokensPerS: f.TokensPerSecond() / float64(r.Ranks), Device: use(graph.Device), Host: use(graph.Host) * float64(min(r.Node, r.Ranks)),
		Parts: published.PartsOf(f.Step.Seconds, f.Step.Exposed, f.Step.Products, f.Step.Attention),
	}, nil
}

func table(rows []published.Row) {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 1, ' ', 0)
	percent := func(v float64) string {
		if v != v {
			return "–"
		}
		return strconv.FormatFloat(100*v, 'f', 0, 64) + " %"
	}
	fmt.Fprintln(w, "| stack\t| card\t| calibration\t| held out\t| ratios\t| median error\t| calibrated: median\t| p90\t| in the 80 % interval\t|")
	fmt.Fprintln(w, "| ---\t| ---\t| ---\t| ---\t| ---\t| ---\t| ---\t| ---\t| ---\t|")
	for _, g := range groupsOf(rows, gpus.Generation) {
		card := g.Card
		if card == "" {
			card = "all"
		}
		fmt.Fprintf(w, "| %s\t| %s\t| %d\t| %d\t| %.2f to %.2f\t| %s\t| %s\t| %s\t| %d (%s)\t|\n", g.Stack, card, g.Calibration, g.Held,
			g.Least, g.Most, percent(g.Raw), percent(g.Median), percent(g.P90), g.Within, percent(float64(g.Within)/float64(g.Held)))
	}
	_ = w.Flush()
	fmt.Println()
	for _, r := range rows {
		if r.Device > 0 {
			fmt.Printf("%s, %s on %d × %s: GPU memory %.1f GiB published, %.1f here\n", r.Project, r.Model, r.Ranks, r.Card, r.Device/(1<<30), r.Here.Device/(1<<30))
		}
		if r.Host > 0 {
			fmt.Printf("%s, %s on %d × %s: host memory of a server %.0f GB published, %.0f here\n", r.Project, r.Model, r.Ranks, r.Card, r.Host/1e9, r.Here.Host/1e9)
		}
	}
}
