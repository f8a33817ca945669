// Package bench is the command bench.
package bench

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/host"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/graph"
	page "github.com/spillway-ml/spillway/memplan/report"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/zero"
)

// Command is bench, with zero and comm below it.
func Command() *cobra.Command {
	bench := &cobra.Command{Use: "bench", Short: "Measure", Args: cli.NoArguments,
		RunE: func(*cobra.Command, []string) error { return errors.New("bench: name what to measure: zero or comm") }}
	bench.AddCommand(benchZeroCommand(), CommCommand())
	return bench
}

func benchZeroCommand() *cobra.Command {
	var c spillway.Config
	var l options.Later
	var jsonPath, svgPath string
	cmd := &cobra.Command{
		Use:   "zero",
		Short: "Every ZeRO stage with the same model, data and seed: memory, time, communication, loss",
		Args:  cli.NoArguments,
	}
	options.Train(cmd.Flags(), &c, &l)
	cmd.Flags().StringVar(&jsonPath, "json", "", "write a row a stage as JSON to `FILE`, - for stdout")
	cmd.Flags().StringVar(&svgPath, "svg", "", "write the chart of memory by class to `FILE`")
	for _, f := range ofOneRun {
		cmd.Flags().Lookup(f.flag).Hidden = true
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		isDemo := !cmd.Flags().Changed("model") && !cmd.Flags().Changed("data") && !cmd.Flags().Changed("config")
		capped := cmd.Flags().Changed("device-memory")
		if err := errors.Join(refuseOfOneRun(cmd.Flags()), svgName(svgPath)); err != nil {
			return err
		}
		if isDemo && !cmd.Flags().Changed("steps") {
			if err := cmd.Flags().Set("steps", "20"); err != nil {
				return err
			}
		}
		_, wrong := options.Settle(cmd.Flags(), &c, &l)
		if !isDemo { // the config file's keys too
			wrong = cmp.Or(refuseOfOneRun(cmd.Flags()), wrong)
		}
		if wrong != nil {
			return wrong
		}
		if err := l.Follow(cmd.Flags(), &c, cmd.ErrOrStderr()); err != nil {
			return err
		}
		options.TuneDisk(&c, cmd.ErrOrStderr())
		if isDemo {
			root, err := options.Goroot()
			if err != nil {
				return err
			}
			c.Data = filepath.Join(root, "src")
			if !capped {
				c.DeviceMemory = 0 // stage 0 is measured too
			}
			c.Checkpoint, c.Keep = "", 0 // the demo's own
		}
		table := cmd.OutOrStdout()
		if jsonPath == "-" {
			table = io.Discard
		}
		return benchZero(cmd.Context(), c, table, cmd.ErrOrStderr(), cmd.OutOrStdout(), jsonPath, svgPath)
	}
	return cmd
}

// ofOneRun are the flags that mean something for a single run only.
var ofOneRun = []struct{ flag, why string }{
	{"zero", "; leave it out"},
	{"fit", ", and --fit chooses one; leave it out"},
	{"metrics", " and writes no lines of steps; leave it out (--json has a row a stage)"},
	{"metrics-addr", " and serves no metrics of steps; leave it out (--json has a row a stage)"},
	{"tensorboard", " and writes no curves; leave it out (--json has a row a stage)"},
	{"checkpoint", " and keeps none of them; leave it out"},
	{"export", " and keeps none of them; leave it out"},
	{"resume", ", each from its first step; leave it out"},
	{"save-every", " and keeps none of them; leave it out"},
	{"keep", " and keeps none of them; leave it out"},
}

func refuseOfOneRun(fs *pflag.FlagSet) error {
	for _, f := range ofOneRun {
		if fs.Changed(f.flag) {
			return fmt.Errorf("--%s: bench zero runs every stage%s", f.flag, f.why)
		}
	}
	return nil
}

// stageRow is a stage's line in --json; the first six keys are contracted.
type stageRow struct {
	Zero              int              `json:"zero"`
	DevicePeakBytes   int64            `json:"device_peak_bytes"`
	StepSecondsMedian float64          `json:"step_seconds_median"`
	TokensPerS        float64          `json:"tokens_per_s"`
	CommBytesPerStep  int64            `json:"comm_bytes_per_step"` // a rank
	LossLast          float32          `json:"loss_last"`
	PlannedBytes      int64            `json:"device_planned_bytes"`
	ByClass           map[string]int64 `json:"by_class"`
	ClassPeak         map[string]int64 `json:"class_peak_bytes"`
	TextbookBytes     int64            `json:"comm_textbook_bytes"`
	StepSeconds       []float64        `json:"step_seconds"`
}

func benchZero(ctx context.Context, c spillway.Config, table, progress, stdout io.Writer, jsonPath, svgPath string) error {
	var rows []stageRow
	for z := range 4 {
		c.Zero = z
		row, seq, err := benchStage(ctx, c, progress)
		if errors.Is(err, context.Canceled) {
			return cli.Interrupted(fmt.Sprintf("interrupted in stage %d", z))
		}
		if z == 0 && errors.Is(err, spillway.ErrConfig) { // of every stage
			return err
		}
		if err != nil {
			return fmt.Errorf("stage %d: %w", z, err)
		}
		rows = append(rows, row)
		c.Seq = seq
	}
	printStages(table, c, rows)
	if svgPath != "" {
		chart, err := stageChart(c, rows)
		if err == nil {
			err = cli.WriteNew(svgPath, chart)
		}
		if err != nil {
			return fmt.Errorf("--svg: %w", err)
		}
	}
	if jsonPath == "" {
		return nil
	}
	text, err := json.MarshalIndent(rows, "", "  ")
	if err != nil {
		return err
	}
	text = append(text, '\n')
	if jsonPath == "-" {
		_, err = stdout.Write(text)
		return err
	}
	if err := os.MkdirAll(filepath.Dir(jsonPath), 0o755); err != nil {
		return fmt.Errorf("--json: %w", err)
	}
	return os.WriteFile(jsonPath, text, 0o644)
}

// benchStage runs a stage; seq is the tokens of a row, with the model's default
// filled in.
func benchStage(ctx context.Context, c spillway.Config, progress io.Writer) (row stageRow, seq int, err error) {
	t, closeAll, err := host.NewTrainer(ctx, c, spillway.New)
	if err != nil {
		return row, 0, err
	}
	leave := cli.Shelter() // until all is given back
	defer func() {
		err = errors.Join(err, closeAll())
		leave()
	}()
	c = t.Config()
	fmt.Fprintf(progress, "stage %d …\n", c.Zero)
	p := t.Plan()
	use := p.Layout.Spaces[graph.Device]
	row = stageRow{Zero: c.Zero, PlannedBytes: use.Peak, ByClass: map[string]int64{}, ClassPeak: map[string]int64{}}
	for class := range graph.NumClasses {
		row.ByClass[class.String()], row.ClassPeak[class.String()] = use.ByClass[class], use.ClassPeak[class]
	}
	var flat int64
	for i := range p.Program.Units {
		flat += p.Program.Units[i].FlatLen
	}
	row.TextbookBytes = textbook(c, flat)
	var sent int64
	err = t.Run(ctx, func(r spillway.StepResult) error {
		row.StepSeconds = append(row.StepSeconds, r.Seconds)
		row.LossLast = r.Loss
		row.DevicePeakBytes = slices.Max(r.Peak[graph.Device])
		sent = r.CommBytes
		return nil
	})
	if err != nil {
		return row, 0, cli.Fault(err)
	}
	row.CommBytesPerStep = sent / int64(c.Ranks)
	row.StepSecondsMedian = median(row.StepSeconds[min(1, len(row.StepSeconds)-1):]) // the first step faults memory in
	row.TokensPerS = float64(c.StepRows()*c.Seq) / row.StepSecondsMedian
	return row, c.Seq, nil
}

// textbook is what a rank sends in a step by the ZeRO paper's section 7, in bytes
// of the run's precision, from so many elements of padded flat parameters: an
// all-reduce for stage 0; a reduce-scatter and one all-gather of the parameters for
// stages 1 and 2; a reduce-scatter and two all-gathers for stage 3. Reductions count
// once for each micro-step that reduces, the gathers of stage 3 once for each
// micro-step; layer order has one of either.
func textbook(c spillway.Config, flat int64) int64 {
	s, ranks := zero.Stage(c.Zero), int64(c.Ranks)
	micro := int64(1)
	if (s.ShardsGrads() || c.Reproducible) && !strings.EqualFold(c.AccumOrder, "layer") {
		micro = int64(c.Accum)
	}
	in32 := flat / ranks * (ranks - 1) * 4
	gather := in32
	if !strings.EqualFold(c.Precision, "fp32") {
		gather /= 2
	}
	reduce := gather
	if strings.EqualFold(c.Reduce, "fp32") {
		reduce = in32
	}
	switch {
	case s.ShardsParams():
		return (2*gather + reduce) * micro
	case s.ShardsStates():
		return reduce*micro + gather
	case c.Reproducible: // every micro-step's leaves are exchanged, and their fp32 sum is gathered once
		return reduce*micro + in32
	}
	return 2 * reduce * micro
}

func median(v []float64) float64 {
	s := slices.Clone(v)
	slices.Sort(s)
	if len(s) == 0 {
		return 0
	}
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}

func printStages(w io.Writer, c spillway.Config, rows []stageRow) {
	fmt.Fprintf(w, "model %s, %d ranks, micro-batch %d × %d tokens, accumulation %d, %d steps\n\n", c.Model, c.Ranks, c.Batch, c.Seq, c.Accum, c.Steps)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "ZeRO\tplanned\ttouched\tparameters\tgradients\toptimizer\tactivations\tunsharded\tother\tstep s\ttokens/s\tsent a step\ttextbook\tlast loss\t")
	for _, r := range rows {
		other := r.ClassPeak["communication"] + r.ClassPeak["workspace"] + r.ClassPeak["inputs"] + r.ClassPeak["padding"]
		fmt.Fprintf(tw, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%.4f\t%.0f\t%s\t%s\t%v\t\n", r.Zero, plan.Bytes(r.PlannedBytes), plan.Bytes(r.DevicePeakBytes),
			plan.Bytes(r.ClassPeak["parameters"]), plan.Bytes(r.ClassPeak["gradients"]), plan.Bytes(r.ClassPeak["optimizer"]),
			plan.Bytes(r.ClassPeak["activations"]), plan.Bytes(r.ClassPeak["unsharded"]), plan.Bytes(other),
			r.StepSecondsMedian, r.TokensPerS, plan.Bytes(r.CommBytesPerStep), plan.Bytes(r.TextbookBytes), r.LossLast)
	}
	tw.Flush()
	fmt.Fprintln(w, "\nBy class: each class's own highest bytes on a rank. Planned: the arena; touched: its highest byte that an executed operation used.")
	fmt.Fprintln(w, "Sent: bytes a rank sends, ring-equivalent. Textbook: 2Ψ(N−1)/N (3Ψ at stage 3) of the padded parameters in the precision's bytes, per reducing micro-step.")
}

// stageChart draws device memory at the peak, stacked by class, a bar a stage.
func stageChart(c spillway.Config, rows []stageRow) ([]byte, error) {
	chart := page.Bars{Title: "Device memory of a rank at its peak, by class", Capacity: c.DeviceMemory,
		Note: fmt.Sprintf("%s, %s, micro-batch %d × %d tokens, accumulation %d", c.Model, english.Plural(c.Ranks, "rank", ""), c.Batch, c.Seq, c.Accum)}
	for _, r := range rows {
		bar := page.Bar{Name: fmt.Sprintf("ZeRO-%d", r.Zero)}
		for class := range graph.NumClasses {
			bar.Bytes[class] = r.ByClass[class.String()]
		}
		chart.Bars = append(chart.Bars, bar)
	}
	var out bytes.Buffer
	err := chart.SVG(&out)
	return out.Bytes(), err
}

// svgName refuses names that no viewer takes for an SVG, before the runs.
func svgName(path string) error {
	if path == "" || strings.HasSuffix(strings.ToLower(path), ".svg") {
		return nil
	}
	return fmt.Errorf("--svg %s: the chart is an SVG; give a name that ends in .svg", path)
}
