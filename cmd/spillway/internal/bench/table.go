package bench

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
)

// column is a column of a table of rows.
type column struct {
	head string
	cell func(r *Row, unit float64) string
}

// table has a line for each row and shared columns. In a table of bytes all columns share a unit.
type table struct {
	title   string
	bytes   func(r *Row) int64 // the largest number of bytes in a row; nil: no bytes
	columns []column
	note    string
}

func byteCell(of func(r *Row) int64) func(*Row, float64) string {
	return func(r *Row, unit float64) string {
		if of(r) == 0 && r.PlannedBytes == 0 { // not known of a peer
			return "–"
		}
		return digits(float64(of(r)) / unit)
	}
}

func classCell(class string) func(*Row, float64) string {
	return byteCell(func(r *Row) int64 { return r.ClassPeak[class] })
}

// zeroTables are the tables of bench zero.
var zeroTables = []table{
	{"Memory of a rank", func(r *Row) int64 { return max(r.PlannedBytes, r.ResidentBytes) }, []column{
		{"planned", byteCell(func(r *Row) int64 { return r.PlannedBytes })},
		{"touched", byteCell(func(r *Row) int64 { return r.DevicePeakBytes })},
		{"resident", byteCell(func(r *Row) int64 { return r.ResidentBytes })},
		{"params", classCell("parameters")}, {"grads", classCell("gradients")}, {"optim", classCell("optimizer")},
		{"activ", classCell("activations")}, {"unshard", classCell("unsharded")},
		{"other", byteCell(func(r *Row) int64 {
			return r.ClassPeak["communication"] + r.ClassPeak["workspace"] + r.ClassPeak["inputs"] + r.ClassPeak["padding"]
		})}},
		"Planned: the arena. Touched: its highest byte that an executed operation used. Resident: the process's most, less what it had before the model, over its ranks. By class: each class's own highest bytes."},
	{"Time of a step", nil, []column{
		{"median s", func(r *Row, _ float64) string { return digits(r.StepSecondsMedian) }},
		{"p10", func(r *Row, _ float64) string { return digits(r.P10) }},
		{"p90", func(r *Row, _ float64) string { return digits(r.P90) }},
		{"predicted", func(r *Row, _ float64) string { return optional(r.Predicted, digits) }},
		{"tokens/s", func(r *Row, _ float64) string { return fmt.Sprintf("%.0f", r.TokensPerS) }},
		{"of peak", func(r *Row, _ float64) string { return optional(r.FlopsShare, percent) }},
		{"data s", func(r *Row, _ float64) string { return digits(r.DataWait) }},
		{"last loss", func(r *Row, _ float64) string { return fmt.Sprintf("%.7g", r.LossLast) }}},
		"Of peak: model FLOPs as a share of the machine's peak. Data: reading samples, the slowest rank."},
	{"Sent by a rank in a step", func(r *Row) int64 { return max(r.CommBytesPerStep, r.TextbookBytes) }, []column{
		{"measured", byteCell(func(r *Row) int64 { return r.CommBytesPerStep })},
		{"theory", byteCell(func(r *Row) int64 { return r.TextbookBytes })},
		{"gather", against("all_gather")}, {"scatter", against("reduce_scatter")}, {"all-reduce", against("all_reduce")},
		{"hidden", func(r *Row, _ float64) string { return optional(r.HiddenShare, percent) }}},
		"By collective: planned / theory. Theory: 2Ψ(N−1)/N (3Ψ at stage 3) of the padded parameters in the precision's bytes, per reducing micro-step. Hidden: the share of the collectives' time, waiting among it, in which the rank computed."},
}

// against returns a cell with the planned bytes of a collective and the theory's.
func against(op string) func(*Row, float64) string {
	return func(r *Row, unit float64) string {
		if r.Sent[op] == 0 && r.Textbook[op] == 0 {
			return "–"
		}
		return digits(float64(r.Sent[op])/unit) + "/" + digits(float64(r.Textbook[op])/unit)
	}
}

// digits formats a number with about four digits.
func digits(v float64) string {
	switch {
	case v == 0:
		return "0"
	case v >= 1000:
		return fmt.Sprintf("%.0f", v)
	case v >= 0.1:
		return fmt.Sprintf("%.*f", min(3, max(0, 4-len(fmt.Sprintf("%.0f", v)))), v)
	}
	if v < 0.01 && v >= 0.00005 {
		return fmt.Sprintf("%.6f", v)
	}
	return fmt.Sprintf("%.4f", v)
}

func percent(v float64) string { return fmt.Sprintf("%.1f %%", 100*v) }

func optional(v *float64, text func(float64) string) string {
	if v == nil {
		return "–"
	}
	return text(*v)
}

// unitOf returns the binary unit in which the largest value is below 2048.
func unitOf(rows []*Row, largest func(*Row) int64) (unit float64, name string) {
	unit = 1
	if largest == nil {
		return unit, ""
	}
	most := 0.0
	for _, r := range rows {
		most = max(most, float64(largest(r)))
	}
	names := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	k := 0
	for ; most/unit >= 2048 && k < len(names)-1; k++ {
		unit *= 1024
	}
	return unit, names[k]
}

// cells returns the title of a table and its texts, the heading first. Rows that did not run have
// dashes.
func (t *table) cells(rows []*Row) (title string, cells [][]string) {
	unit, name := unitOf(rows, t.bytes)
	if title = t.title; name != "" {
		title += ", " + name
	}
	head := []string{""}
	for _, c := range t.columns {
		head = append(head, c.head)
	}
	cells = append(cells, head)
	for _, r := range rows {
		line := []string{r.Name}
		for _, c := range t.columns {
			if r.Missing != "" {
				line = append(line, "–")
			} else {
				line = append(line, c.cell(r, unit))
			}
		}
		cells = append(cells, line)
	}
	return title, cells
}

// print writes a table of at most terminal columns. Columns that do not fit follow below, again
// with the rows' names. A name longer than longName is printed above its row.
func (t *table) print(w io.Writer, rows []*Row) {
	title, cells := t.cells(rows)
	fmt.Fprintln(w, title)
	widths := make([]int, len(cells[0]))
	for _, line := range cells {
		for i, text := range line {
			if n := utf8.RuneCountInString(text); i > 0 || n <= longName {
				widths[i] = max(widths[i], n)
			}
		}
	}
	for from := 1; from < len(widths); {
		to, sum := from+1, widths[0]+1+widths[from]
		for to < len(widths) && sum+1+widths[to] <= terminal {
			sum += 1 + widths[to]
			to++
		}
		if from > 1 {
			fmt.Fprintln(w)
		}
		gap := strings.Repeat(" ", max(1, min(2, (terminal-sum)/(to-from)+1)))
		for _, line := range cells {
			name := line[0]
			if utf8.RuneCountInString(name) > longName {
				for part := range slices.Chunk([]rune(name), terminal) {
					fmt.Fprintln(w, string(part))
				}
				name = ""
			}
			text := name + strings.Repeat(" ", widths[0]-utf8.RuneCountInString(name))
			for i := from; i < to; i++ {
				text += gap + strings.Repeat(" ", widths[i]-utf8.RuneCountInString(line[i])) + line[i]
			}
			fmt.Fprintln(w, strings.TrimRight(text, " "))
		}
		from = to
	}
	if t.note != "" {
		cli.Wrap(w, "", "", t.note)
	}
	fmt.Fprintln(w)
}

// terminal is the minimum width of a terminal in columns; longName is the longest name beside a
// row.
const terminal, longName = cli.Terminal, 34
