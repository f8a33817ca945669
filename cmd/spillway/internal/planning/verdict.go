package planning

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/dustin/go-humanize/english"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/planner"
)

// verdictLines is the maximum number of lines of a verdict.
const verdictLines = 15

// where names the devices of a plan.
func (f *Flags) where(c *config.Config) string {
	if f.gpuFound == nil {
		return english.Plural(c.Ranks, "CPU rank", "")
	}
	return fmt.Sprintf("%d × %s", c.Ranks, f.gpuFound.Name)
}

// verdict prints the answer in at most verdictLines lines: whether it fits, a command, memory,
// time and speed.
func (r *planReport) verdict(w io.Writer) {
	c := r.asked.Config
	a, says := r.answer()
	var first, table strings.Builder
	cli.Wrap(&first, "", "  ", fmt.Sprintf("%s on %s %s", cli.OnOneLine(c.Model), r.flags.where(&c), says))
	if here := r.refusedHere(a); here != "" {
		cli.Wrap(&first, "  ", "  ", here)
	}
	r.figures(&table, a)
	if a == nil {
		fmt.Fprint(w, first.String(), table.String())
		return
	}
	var wrapped strings.Builder
	command, refused := r.flags.command(&a.plan.Config, a.changes)
	cli.WrapFlags(&wrapped, "  ", "    ", command)
	if refused != nil {
		cli.Wrap(&first, "  ", "  ", "planned only: "+cli.Flagged(refused.Error()))
	}
	if strings.Count(first.String()+wrapped.String()+table.String(), "\n") > verdictLines {
		wrapped.Reset()
		fmt.Fprintln(&wrapped, "  "+command)
	}
	fmt.Fprint(w, first.String(), wrapped.String(), table.String())
}

// figures prints memory, time and speed of the answer and, if it differs, of the request.
func (r *planReport) figures(w io.Writer, a *answer) {
	plans, head := []*planner.Forecast{r.asked}, []string{"as requested"}
	if a != nil {
		plans[0] = a.plan
		if head[0] = "recommended"; a.changes != nil && !r.flags.chosen {
			plans, head = append(plans, r.asked), append(head, "as requested")
		}
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if len(plans) > 1 {
		fmt.Fprintln(tw, "  \t"+strings.Join(head, "\t"))
	}
	for _, row := range r.figureRows(plans) {
		fmt.Fprint(tw, "  ", row.name)
		for _, p := range plans {
			fmt.Fprint(tw, "\t", row.cell(p))
		}
		fmt.Fprintln(tw)
	}
	tw.Flush()
	if line := r.flags.budgetText(plans[0]); line != "" {
		cli.Wrap(w, "  ", "    ", line)
	}
}
