package bench

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dustin/go-humanize/english"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	page "github.com/spillway-ml/spillway/memplan/report"
)

// outputs are the files for results.
type outputs struct {
	json, svg, html, compare string
	old                      []*Row // the rows of compare; nil: none
}

func (o *outputs) flags(fs *pflag.FlagSet) {
	fs.StringVar(&o.json, "json", "", "write the rows of the results table as JSON to `FILE`, - for stdout")
	fs.StringVar(&o.svg, "svg", "", "write the chart of memory by class to `FILE`")
	fs.StringVar(&o.html, "html", "", "write one self-contained HTML page with charts and tables to `FILE`")
	fs.StringVar(&o.compare, "compare", "", "report changes beyond noise since an earlier --json `FILE`")
}

// check rejects, before the runs, output files that cannot be written, names without the matching
// extension, and rows that cannot be compared. It reads these now, as --json may overwrite them.
func (o *outputs) check(ofScale bool) (err error) {
	if o.compare != "" {
		o.old, err = readRows(o.compare, ofScale)
	}
	return cmp.Or(named("svg", o.svg, "chart is an SVG"), named("html", o.html, "page is HTML"), err,
		cli.CheckOutput("json", o.json), cli.CheckOutput("svg", o.svg), cli.CheckOutput("html", o.html))
}

func named(flag, path, what string) error {
	if path == "" || strings.HasSuffix(strings.ToLower(path), "."+flag) {
		return nil
	}
	return fmt.Errorf("--%s %s: the %s; give a name that ends in .%[1]s", flag, path, what)
}

// report is the result of a benchmark, formatted for people.
type report struct {
	title, what string
	*session
	tables   []table
	notes    []string
	charts   func(*report) []*page.Bars
	compared *compared // nil: no comparison
	made     []string  // the command
	capacity int64     // of a rank's device memory; 0: none
}

// write prints the tables and writes the requested files.
func (o *outputs) write(cmd *cobra.Command, r *report) error {
	if o.old != nil {
		r.compared = compare(o.compare, o.old, r.rows())
		r.notes = append(r.notes, r.compared.lines()...)
	}
	if o.json != "-" {
		r.print(cmd.OutOrStdout())
	}
	if o.html != "" {
		var out bytes.Buffer
		err := r.page().HTML(&out)
		if err == nil {
			err = cli.WriteNew(o.html, out.Bytes())
		}
		if err != nil {
			return fmt.Errorf("--html: %w", err)
		}
	}
	if o.svg != "" {
		var chart bytes.Buffer
		err := r.charts(r)[0].SVG(&chart)
		if err == nil {
			err = cli.WriteNew(o.svg, chart.Bytes())
		}
		if err != nil {
			return fmt.Errorf("--svg: %w", err)
		}
	}
	return cmp.Or(cli.WriteJSON(cmd.OutOrStdout(), o.json, r.rows()), r.stopped)
}

// heading returns lines about the job, the rounds and the machine.
func (r *report) heading() []string {
	m := r.machine
	counted := fmt.Sprintf("%s of %d steps in turn, not counting %s of each round",
		english.Plural(r.rounds, "round", ""), r.steps(), english.Plural(r.warmup, "warm-up step", ""))
	return []string{r.what, counted,
		fmt.Sprintf("%s, %d threads, %s; peak %.0f GFLOP/s: the fastest of a few fp32 products of 1,024 rows and columns", cmp.Or(m.CPU, "unknown processor"), m.Cores, m.SIMD, m.Peak/1e9)}
}

func (r *report) steps() (n int) {
	for _, j := range r.jobs {
		n = max(n, len(j.last.steps))
	}
	return n
}

func (r *report) print(w io.Writer) {
	for _, line := range r.heading() {
		cli.Wrap(w, "", "  ", line)
	}
	fmt.Fprintln(w)
	for i := range r.tables {
		r.tables[i].print(w, r.rows())
	}
	for _, line := range r.remarks() {
		cli.Wrap(w, "", "  ", line)
	}
}

// remarks returns lines about missing rows, rows with equal bits, and the source of predicted
// times.
func (r *report) remarks() (lines []string) {
	for _, row := range r.rows() {
		if row.Missing != "" {
			lines = append(lines, row.Name+" is missing: "+row.Missing)
		}
	}
	if r.stopped != nil {
		lines = append(lines, fmt.Sprintf("The command was %v: what ran until then is counted.", r.stopped))
	}
	lines = append(lines, sameBits(r.rows())...)
	lines = append(lines, r.notes...)
	return append(lines, "Predicted times: "+r.machine.Rates+".")
}

// sameBits groups the completed rows that ended with the same bits: every loss, and the parameters.
func sameBits(rows []*Row) (lines []string) {
	key := func(r *Row) string { return fmt.Sprint(r.Losses, r.SHA256) }
	groups, order, between := map[string][]string{}, []string{}, ", "
	for _, r := range rows {
		if r.Missing != "" || r.SHA256 == "" {
			continue
		}
		if groups[key(r)] == nil {
			order = append(order, key(r))
		}
		groups[key(r)] = append(groups[key(r)], r.Name)
		if strings.Contains(r.Name, ",") {
			between = "; "
		}
	}
	for _, k := range order {
		if len(groups[k]) > 1 {
			lines = append(lines, "The same bits, every loss and the parameters' SHA-256: "+strings.Join(groups[k], between)+".")
		} else {
			lines = append(lines, groups[k][0]+" has bits of its own.")
		}
	}
	return lines
}
