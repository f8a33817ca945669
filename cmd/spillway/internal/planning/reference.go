package planning

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	page "github.com/spillway-ml/spillway/memplan/report"
	"github.com/spillway-ml/spillway/plan"
)

// references are the values of --reference.
var references = []string{"none", "megatron"}

// referenceSection compares the formula of --reference with the plan's activations.
type referenceSection struct {
	title, note string
	rows        [][]string // name, bytes, values a token, layer and unit of width
}

func (f *Flags) validateReference() error {
	if slices.ContainsFunc(references, func(name string) bool { return strings.EqualFold(f.reference, name) }) {
		return nil
	}
	return fmt.Errorf("--reference %q is not known; use one of %s", f.reference, strings.Join(references, ", "))
}

// reference returns nil if no formula was requested.
func (r *planReport) reference() (*referenceSection, error) {
	if !strings.EqualFold(r.flags.reference, "megatron") {
		return nil, nil
	}
	m, err := r.asked.MegatronActivations()
	if err != nil {
		return nil, err
	}
	c := r.asked.Config
	s := &referenceSection{title: "Activations of a rank beside Megatron's formula"}
	for i, row := range []struct {
		name  string
		bytes int64
	}{
		{"sbh(34 + 5as/h) a layer", m.All},
		{"selective (section 5): 34sbh a layer", m.Selective},
		{fmt.Sprintf("this plan: %s, --recompute %s", strings.ToLower(c.Precision), cmp.Or(c.Recompute, "none")),
			m.Ours},
	} {
		s.rows = append(s.rows, []string{row.name, plan.Bytes(row.bytes), fmt.Sprintf("%.1f", m.Values[i])})
	}
	s.note = "Bytes, and values a token, layer and unit of width. The formula is Korthikanti et al. 2022, section " +
		"4.1, equation 1. It assumes values of 16 bits, dropout masks of a byte an element that are stored, " +
		"attention whose scores, softmax and dropped copy are stored, and no parallelism within layers. " +
		"This plan stores no masks (dropout is a function of a counter) and no scores (attention goes in tiles), and " +
		"counts what the embedding, the head and the loss keep."
	if m.Gated {
		s.note += " The model's MLP is gated and narrower than the formula's."
	}
	return s, nil
}

func (s *referenceSection) print(w io.Writer) {
	fmt.Fprintln(w, s.title)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range s.rows {
		fmt.Fprintf(tw, "  %s\t%s\t%s\n", row[0], row[1], row[2])
	}
	tw.Flush()
	fmt.Fprintf(w, "%s\n", wrapped(s.note, 78))
}

func (s *referenceSection) table() page.Table {
	return page.Table{Title: s.title, Note: s.note, Mark: len(s.rows) - 1,
		Head: []string{"", "bytes", "values a token, layer and unit of width"}, Rows: s.rows}
}

// wrapped breaks a text into lines of at most width columns, indented by two.
func wrapped(text string, width int) string {
	var b strings.Builder
	column := width
	for _, word := range strings.Fields(text) {
		if n := len([]rune(word)); column+1+n > width {
			if b.Len() > 0 {
				b.WriteByte('\n')
			}
			b.WriteString("  " + word)
			column = 2 + n
		} else {
			b.WriteString(" " + word)
			column += 1 + n
		}
	}
	b.WriteByte('\n')
	return b.String()
}
