package main

import (
	"cmp"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

// planReport is what a person is told.
type planReport struct {
	flags    *planFlags
	stages   []*spillway.Forecast
	asked    *spillway.Forecast
	ways     []spillway.Way
	best     *spillway.Fitted       // nil without --fit
	smallest [graph.NumSpaces]int64 // bytes: the least that a way tried needs
}

func (r *planReport) print(w io.Writer) error {
	r.heading(w)
	if r.best != nil {
		printFitted(w, r.best)
		fmt.Fprintln(w)
	}
	for s := range graph.NumSpaces {
		r.space(w, s)
	}
	r.steps(w)
	r.alive(w)
	r.waysOut(w)
	return nil
}

func (r *planReport) heading(w io.Writer) {
	c := r.asked.Config
	fmt.Fprintf(w, "%s: %s parameters, %s; %d rank(s)", c.Model, grouped(r.asked.Parameters()), strings.ToLower(c.Precision), c.Ranks)
	switch f := r.flags; {
	case f.countInNodes:
		fmt.Fprintf(w, " (%d nodes of %d)", f.nodes, f.gpusPerNode)
	case f.gpuFound != nil && c.Ranks > f.nodeSize:
		fmt.Fprintf(w, " (taken as nodes of %d)", f.nodeSize)
	}
	if c.ShardSize > 0 && c.ShardSize < c.Ranks {
		fmt.Fprintf(w, ", sharded over %d and replicated %d times", c.ShardSize, c.Ranks/c.ShardSize)
	}
	fmt.Fprintf(w, "; micro-batch %d × %d tokens, accumulation %d: %s tokens a step\n", c.Batch, c.Seq, c.Accum, grouped(int64(c.Ranks)*int64(c.Batch)*int64(c.Accum)*int64(c.Seq)))
	if g := r.flags.gpuFound; g != nil {
		fmt.Fprintf(w, "GPU %s: %s of memory, of which about %s go to the context and libraries (an estimate for its generation)\n", g.Name, plan.Bytes(g.Memory), plan.Bytes(g.OutsideBytes()))
	}
	fmt.Fprintln(w)
}

// space tells about one memory space, a line a stage; spaces that no stage uses
// are left out.
func (r *planReport) space(w io.Writer, s graph.Space) {
	var used [graph.NumClasses]bool
	any := false
	for _, f := range r.stages {
		use := &f.Plan.Layout.Spaces[s]
		any = any || use.Peak > 0
		for c, n := range use.ByClass {
			used[c] = used[c] || n > 0
		}
	}
	limit := r.asked.Plan.Config.Capacity[s]
	if !any {
		return
	}
	title := strings.ToUpper(s.String()[:1]) + s.String()[1:]
	fmt.Fprintf(w, "%s memory of a rank at its peak, by class", title)
	if limit > 0 {
		fmt.Fprintf(w, "; the cap is %s", plan.Bytes(limit))
	}
	fmt.Fprintln(w)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(tw, "ZeRO\t")
	for c := range graph.NumClasses {
		if used[c] {
			fmt.Fprintf(tw, "%s\t", c)
		}
	}
	fmt.Fprint(tw, "peak\t")
	outsideOf := func(f *spillway.Forecast) int64 { return f.Plan.Config.Outside[s] }
	anyOutside := slices.ContainsFunc(r.stages, func(f *spillway.Forecast) bool { return outsideOf(f) > 0 })
	if anyOutside {
		fmt.Fprint(tw, "outside\t")
	}
	if limit > 0 {
		fmt.Fprint(tw, "fits\t")
	}
	fmt.Fprintln(tw)
	for _, f := range r.stages {
		use := &f.Plan.Layout.Spaces[s]
		mark := ""
		if f == r.asked {
			mark = "→ "
		}
		fmt.Fprintf(tw, "%s%d\t", mark, f.Config.Zero)
		for c := range graph.NumClasses {
			if used[c] {
				fmt.Fprintf(tw, "%s\t", plan.Bytes(use.ByClass[c]))
			}
		}
		fmt.Fprintf(tw, "%s\t", plan.Bytes(use.Peak))
		if anyOutside {
			fmt.Fprintf(tw, "%s\t", plan.Bytes(outsideOf(f)))
		}
		if limit > 0 {
			if over := use.Peak + outsideOf(f) - limit; over <= 0 {
				fmt.Fprintf(tw, "yes, %s free\t", plan.Bytes(-over))
			} else {
				fmt.Fprintf(tw, "no, %s over\t", plan.Bytes(over))
			}
		}
		fmt.Fprintln(tw)
	}
	tw.Flush()
	fmt.Fprintln(w)
}

// steps tells of each stage where the peak is, what a rank sends, and the time.
func (r *planReport) steps(w io.Writer) {
	fmt.Fprintln(w, "A step, predicted")
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "ZeRO\tsent by a rank\ttime\tcomputing\twaiting\ttokens/s\tfits\tpeak of device memory at")
	for _, f := range r.stages {
		mark, fits := "  ", "yes"
		if f == r.asked {
			mark = "→ "
		}
		if !f.Fits {
			fits = "no"
		}
		at := f.Plan.Layout.Spaces[graph.Device].PeakAt
		fmt.Fprintf(tw, "%s%d\t%s\t%s\t%s\t%s\t%.0f\t%s\t%s\n", mark, f.Config.Zero, plan.Bytes(f.Plan.CommBytes), seconds(f.Step.Seconds),
			seconds(f.Step.Seconds-f.Step.Exposed), seconds(f.Step.Exposed), f.TokensPerSecond(), fits, at)
	}
	tw.Flush()
	fmt.Fprintf(w, "\nModel states by the ZeRO paper's formula (section 5) at stage %d: %s a rank\n\n", r.asked.Config.Zero, plan.Bytes(int64(textbookStates(r.asked))))
}

var digits = regexp.MustCompile(`[0-9]+`)

// aliveRow is a buffer that is alive at the peak, or several that differ by
// their layer alone.
type aliveRow struct {
	name       string
	class      graph.Class
	count      int
	one, bytes int64
	shape      []int64
	dtype      graph.DType
}

func (e *aliveRow) each() string {
	if e.count == 1 {
		return ""
	}
	return fmt.Sprintf("%d × %s", e.count, plan.Bytes(e.one))
}

// aliveRows lists what is alive at the peak of a space, the largest first.
func aliveRows(p *plan.Plan, s graph.Space) []*aliveRow {
	rows := map[string]*aliveRow{}
	var list []*aliveRow
	for _, id := range p.Layout.Spaces[s].Live {
		b := p.Program.Buf(id)
		key := fmt.Sprint(digits.ReplaceAllString(b.Name, "*"), b.Class, b.Bytes())
		e := rows[key]
		if e == nil {
			e = &aliveRow{name: b.Name, class: b.Class, one: b.Bytes(), shape: b.Shape, dtype: b.DType}
			rows[key] = e
			list = append(list, e)
		}
		if e.count++; e.count == 2 {
			e.name = digits.ReplaceAllString(b.Name, "*")
		}
		e.bytes += b.Bytes()
	}
	slices.SortStableFunc(list, func(a, b *aliveRow) int { return cmp.Compare(b.bytes, a.bytes) })
	return list
}

// alive prints the largest buffers in device memory at the peak.
func (r *planReport) alive(w io.Writer) {
	use := &r.asked.Plan.Layout.Spaces[graph.Device]
	fmt.Fprintf(w, "Largest buffers in device memory at the peak (stage %d, at %s)\n", r.asked.Config.Zero, use.PeakAt)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	const most = 12
	rest, restBytes := 0, int64(0)
	for i, e := range aliveRows(r.asked.Plan, graph.Device) {
		if i >= most {
			rest += e.count
			restBytes += e.bytes
			continue
		}
		fmt.Fprintf(tw, "  %s\t%s\t%s\t%s\t%s\n", plan.Bytes(e.bytes), e.class, e.name, shapeText(e.shape, e.dtype), e.each())
	}
	if rest > 0 {
		fmt.Fprintf(tw, "  %s\t\t%d smaller ones\t\t\n", plan.Bytes(restBytes), rest)
	}
	tw.Flush()
	fmt.Fprintln(w)
}

func shapeText(shape []int64, d graph.DType) string {
	var parts []string
	for _, n := range shape {
		parts = append(parts, fmt.Sprint(n))
	}
	return d.String() + "(" + strings.Join(parts, ", ") + ")"
}

func (r *planReport) waysOut(w io.Writer) {
	if r.asked.Fits {
		return
	}
	if len(r.ways) == 0 {
		fmt.Fprintf(w, "Nothing tried makes it fit: the smallest plans need %s of device and %s of host memory a rank.\n",
			plan.Bytes(r.smallest[graph.Device]), plan.Bytes(r.smallest[graph.Host]))
		return
	}
	fmt.Fprintln(w, "What would make it fit, the cheapest first (each was planned and fits)")
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	asked := r.asked.Plan.Layout.Spaces[graph.Device].Peak
	for _, way := range r.ways {
		use := way.Forecast.Plan.Layout.Spaces[graph.Device].Peak
		note := way.Cost
		if note != "" {
			note = "costs " + note
		}
		fmt.Fprintf(tw, "  %s\tdevice %s (−%s)\tstep %s, %.2f × the time a token of a rank\tsends %s\t%s\n", way.Text, plan.Bytes(use), plan.Bytes(asked-use),
			seconds(way.Forecast.Step.Seconds), way.Slowdown, plan.Bytes(way.Forecast.Plan.CommBytes), note)
	}
	tw.Flush()
}

func seconds(v float64) string {
	d := time.Duration(v * 1e9)
	switch {
	case d >= time.Minute:
		return d.Round(time.Second).String()
	case d >= time.Second:
		return fmt.Sprintf("%.2f s", v)
	case d >= time.Millisecond:
		return fmt.Sprintf("%.1f ms", v*1e3)
	}
	return fmt.Sprintf("%.0f µs", v*1e6)
}

// grouped writes thousands apart.
func grouped(n int64) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
