package planning

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode/utf8"

	"github.com/dustin/go-humanize/english"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/zero"
)

func (r *planReport) print(w io.Writer) error {
	r.verdict(w)
	fmt.Fprintln(w)
	r.heading(w)
	if rec := r.recommended(); rec != nil {
		for _, line := range rec.lines {
			cli.Wrap(w, "", "  ", line)
		}
		fmt.Fprintln(w)
	}
	if r.asked.Auto != "" {
		fmt.Fprintf(w, "recompute auto: %s\n\n", cli.Flagged(r.asked.Auto))
	}
	for s := range graph.NumSpaces {
		r.space(w, s)
	}
	r.steps(w)
	ref, err := r.reference()
	if err != nil {
		return err
	}
	if ref != nil {
		ref.print(w)
	}
	r.alive(w)
	r.waysOut(w)
	return nil
}

func (r *planReport) heading(w io.Writer) {
	c := r.asked.Config
	text := fmt.Sprintf("%s: %s parameters, %s; %s", cli.OnOneLine(c.Model), grouped(r.asked.Parameters()),
		strings.ToLower(c.Precision), english.Plural(c.Ranks, "rank", ""))
	switch f := r.flags; {
	case f.countInNodes:
		text += fmt.Sprintf(" (%s of %d)", english.Plural(f.nodes, "node", ""), f.gpusPerNode)
	case f.gpuFound != nil && c.Ranks > f.nodeSize:
		text += fmt.Sprintf(" (taken as nodes of %d)", f.nodeSize)
	}
	if c.ShardSize > 0 && c.ShardSize < c.DataRanks() {
		text += fmt.Sprintf(", sharded over %d and replicated %d times", c.ShardSize, c.DataRanks()/c.ShardSize)
	}
	if c.Tensor > 1 {
		text += fmt.Sprintf(", every layer shared by %d", c.Tensor)
	}
	if c.Pipelined() {
		text += fmt.Sprintf(", in %d stages (%s)", c.Pipeline, c.TurnsOfStages())
	}
	cli.Wrap(w, "", "  ", text)
	fmt.Fprintf(w, "micro-batch %d × %d tokens, accumulation %d: %s tokens a step\n", c.Batch, c.Seq, c.Accum,
		grouped(int64(c.StepRows())*int64(c.Seq)))
	if len(c.BatchSchedule) > 0 {
		cli.Wrap(w, "", "  ", "batch schedule: "+scheduleText(c.BatchSchedule)+"; memory, what is sent and the speed "+
			"are those of the largest")
	}
	switch shares := c.Shares(); {
	case shares == nil:
	case c.RankShares == nil:
		last := c.Leaves()%c.Ranks - 1
		fmt.Fprintf(w, "ranks 0 to %d have %d micro-batches, the others %d\n", last, shares[0], shares[last+1])
	default:
		fmt.Fprintf(w, "micro-batches of the ranks: %.80s\n", strings.Trim(fmt.Sprint(shares), "[]"))
	}
	if order := r.asked.AccumOrder(); order != "" {
		cli.Wrap(w, "", "  ", order)
	}
	if r.order != nil {
		cli.Wrap(w, "", "  ", cli.Flagged(r.order.String()))
	}
	if g := r.flags.gpuFound; g != nil {
		fmt.Fprintf(w, "GPU %s: %s of memory\n", g.Name, plan.Bytes(g.Memory))
	}
	for _, line := range slices.Concat(cli.FlaggedAll(r.asked.Notes()), r.flags.precisionNotes(&c), r.defaultsNote()) {
		cli.Wrap(w, "", "  ", line)
	}
	fmt.Fprintln(w)
}

// scheduleText formats the rows of a step and the steps from which they apply.
func scheduleText(s config.BatchSchedule) string {
	parts := make([]string, len(s))
	for i, b := range s {
		parts[i] = fmt.Sprintf("%s from step %d on", english.Plural(b.Rows, "row", ""), b.Step)
	}
	return strings.Join(parts, ", ")
}

// precisionNotes returns notes about the request's precision on the GPU.
func (f *Flags) precisionNotes(c *config.Config) (lines []string) {
	g := f.gpuFound
	if g == nil {
		return nil
	}
	precision := strings.ToLower(c.Precision)
	switch {
	case precision == "bf16" && g.Rates.BF16 == 0:
		lines = append(lines, fmt.Sprintf("%s has no units for bf16: its products are planned at the rate of fp32, "+
			"%.3g TFLOP/s; in fp16 it has %.3g", g.Name, g.Rates.FP32/1e12, g.Rates.FP16/1e12))
	case !f.precisionGiven && g.Rates.BF16 == 0:
		lines = append(lines, fmt.Sprintf("%s has no units for bf16; in fp16 its products have %.3g TFLOP/s instead "+
			"of %.3g: --precision fp16", g.Name, g.Rates.FP16/1e12, g.Rates.FP32/1e12))
	}
	if len(c.Int8) > 0 {
		lines = append(lines, "--int8 is planned only: train refuses it with --device cuda, whose kernels have none")
	}
	if strings.EqualFold(c.OptimizerDType, "bf16") {
		lines = append(lines, "--optimizer-dtype bf16 is planned only: train refuses it with --device cuda, whose "+
			"kernels have none")
	}
	return lines
}

// longest bounds the usual length of rows in training, for models with more positions.
const longest = 8192

// positions returns the length of rows that a model is usually trained with.
func positions(p *planner.Forecast) int { return min(p.Shape().Positions, longest) }

// defaultsNote points out that a plan for a GPU uses defaults of train on a CPU, which are unusual
// there.
func (r *planReport) defaultsNote() []string {
	f, c := r.flags, r.asked.Config
	if f.gpuFound == nil || f.precisionGiven && f.seqGiven {
		return nil
	}
	var words, flags []string
	if !f.precisionGiven && !strings.EqualFold(c.Precision, "bf16") { // bf16 was chosen by a search
		words = append(words, strings.ToLower(cmp.Or(c.Precision, "fp32")))
		if f.gpuFound.Rates.BF16 > 0 {
			flags = append(flags, "--precision bf16")
		}
	}
	if n := positions(r.asked); !f.seqGiven && n > c.Seq {
		words = append(words, fmt.Sprintf("rows of %d tokens", c.Seq))
		flags = append(flags, fmt.Sprintf("--seq %d", n))
	}
	if len(flags) == 0 {
		return nil
	}
	return []string{fmt.Sprintf("as requested means the defaults here: %s; as such models are trained: %s",
		strings.Join(words, " and "), strings.Join(flags, " "))}
}

// stageTable writes a table with a column for each stage, narrow enough for a terminal of 80
// columns.
type stageTable struct {
	*tabwriter.Writer
	r *planReport
}

func (r *planReport) stageTable(w io.Writer) stageTable {
	t := stageTable{tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight), r}
	t.row("ZeRO", func(f *planner.Forecast) string {
		if f == r.asked {
			return fmt.Sprintf("→ %d", f.Config.Zero)
		}
		return fmt.Sprint(f.Config.Zero)
	})
	return t
}

func (t stageTable) row(name string, cell func(*planner.Forecast) string) {
	fmt.Fprintf(t, "%-14s\t", name)
	for _, f := range t.r.shown() {
		fmt.Fprintf(t, "%s\t", cell(f))
	}
	fmt.Fprintln(t)
}

// space prints one memory space by stage. It leaves out spaces that no stage uses.
func (r *planReport) space(w io.Writer, s graph.Space) {
	var used [graph.NumClasses]bool
	any, outside := false, false
	for _, f := range r.shown() {
		use := &f.Plan.Layout.Spaces[s]
		any = any || use.Peak > 0
		outside = outside || f.Plan.Config.Outside[s] > 0
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
	t := r.stageTable(w)
	for c := range graph.NumClasses {
		if used[c] {
			t.row(c.String(), func(f *planner.Forecast) string {
				return plan.Bytes(f.Plan.Layout.Spaces[s].ByClass[c])
			})
		}
	}
	t.row("peak", func(f *planner.Forecast) string { return plan.Bytes(f.Plan.Layout.Spaces[s].Peak) })
	if outside {
		t.row("outside", func(f *planner.Forecast) string { return plan.Bytes(f.Plan.Config.Outside[s]) })
	}
	if s == graph.Host && (r.asked.Config.Checkpoint != "" || r.asked.Plan.Config.Staging > 0) {
		t.row("saves", func(f *planner.Forecast) string {
			if n := f.Plan.Config.Staging; n > 0 {
				return plan.Bytes(n) + ", beside"
			}
			return "stall"
		})
	}
	if s == graph.Host && r.flags.ranksAServer(&r.asked.Config) > 1 {
		t.row(fmt.Sprintf("%d, a server", r.flags.ranksAServer(&r.asked.Config)),
			func(f *planner.Forecast) string { return plan.Bytes(r.flags.onServer(f, s)) })
	}
	if limit > 0 {
		free := func(f *planner.Forecast) int64 {
			return limit - f.Plan.Layout.Spaces[s].Peak - f.Plan.Config.Outside[s]
		}
		t.row("fits", func(f *planner.Forecast) string { return yesOrNo(free(f) >= 0) })
		t.row("free", func(f *planner.Forecast) string {
			if n := free(f); n < 0 {
				return "−" + plan.Bytes(-n)
			}
			return plan.Bytes(free(f))
		})
	}
	t.Flush()
	if outside {
		cli.Wrap(w, "  ", "    ", "outside: "+r.outsideNote(s))
	}
	if note := r.flags.serverNote(r.asked); s == graph.Host && note != "" {
		cli.Wrap(w, "  ", "    ", note)
	}
	fmt.Fprintln(w)
}

func yesOrNo(yes bool) string {
	if yes {
		return "yes"
	}
	return "no"
}

// steps prints for each stage the bytes that a rank sends, the time, and the place of the peak.
func (r *planReport) steps(w io.Writer) {
	within := r.flags.timeRange(r.asked)
	switch {
	case within != nil:
		cli.Wrap(w, "", "  ", "A step, predicted from the GPU's rates: "+within.Text()+", and times are that range")
	case r.flags.Rates == "":
		fmt.Fprintln(w, "A step, predicted")
	default:
		cli.Wrap(w, "", "  ", fmt.Sprintf("A step, predicted (CPU: %s)", r.flags.Rates))
	}
	t := r.stageTable(w)
	t.row("sent by a rank", func(f *planner.Forecast) string { return plan.Bytes(f.Plan.CommBytes) })
	for _, row := range r.stepRows() {
		t.row(row.name, row.cell)
	}
	for k, b := range r.asked.StepTimes() {
		if k > 0 {
			t.row(fmt.Sprintf("of %d rows", b.Rows),
				func(f *planner.Forecast) string { return r.flags.seconds(f, f.StepTimes()[k].Step.Seconds) })
		}
	}
	t.row("fits", func(f *planner.Forecast) string { return yesOrNo(f.Fits) })
	t.Flush()
	r.roles(w)
	if line := r.flags.elsewhere(r.asked); line != "" {
		cli.Wrap(w, "", "  ", line)
	}
	fmt.Fprintln(w, "\nWhere device memory is highest")
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, f := range r.shown() {
		mark := "  "
		if f == r.asked {
			mark = "→ "
		}
		fmt.Fprintf(tw, "%s%d\t%s\n", mark, f.Config.Zero, f.Plan.Layout.Spaces[graph.Device].PeakAt)
	}
	tw.Flush()
	fmt.Fprintln(w)
	cli.Wrap(w, "", "  ", fmt.Sprintf("Model states by the ZeRO paper's formula (section 5) at stage %d: %s a rank",
		r.asked.Config.Zero, plan.Bytes(int64(textbookStates(r.asked)))))
	fmt.Fprintln(w)
}

// textbookStates returns the model states by the paper's formula for the requested plan, in bytes:
// 2 + 2 + 12 a parameter in mixed precision, 4 + 4 + 8 in fp32. Tensor and pipeline ranks divide
// the parameters.
func textbookStates(f *planner.Forecast) float64 {
	n := float64(f.Parameters()) / float64(max(f.Config.Tensor, 1)*max(f.Config.Pipeline, 1))
	ranks := f.Config.DataRanks()
	if f.Config.ShardSize > 0 {
		ranks = f.Config.ShardSize
	}
	w, g, k := 4.0, 4.0, 8.0
	if p := strings.ToLower(f.Config.Precision); p == "bf16" || p == "fp16" {
		w, g, k = 2, 2, 12
	}
	return zero.Stage(f.Config.Zero).ModelStateBytes(n, float64(ranks), w, g, k)
}

// roles prints the stages of a pipeline.
func (r *planReport) roles(w io.Writer) {
	list := r.pipeline()
	if len(list) == 0 {
		return
	}
	fmt.Fprintln(w, "\nStages of the pipeline")
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, strings.Join(roleHead, "\t")+"\t")
	for _, role := range list {
		fmt.Fprintln(t, strings.Join(r.roleRow(role), "\t")+"\t")
	}
	t.Flush()
}

// alive prints the largest buffers in device memory at the peak.
func (r *planReport) alive(w io.Writer) {
	use := &r.asked.Plan.Layout.Spaces[graph.Device]
	fmt.Fprintf(w, "Largest buffers in device memory at the peak of stage %d,\nat %s\n", r.asked.Config.Zero,
		use.PeakAt)
	const most = 12
	var lines [][4]string // bytes, class, name, count and shape
	var widest [4]int     // of all but the name
	rest, restBytes := 0, int64(0)
	for i, e := range aliveRows(r.asked.Plan, graph.Device) {
		if i >= most {
			rest += e.count
			restBytes += e.bytes
			continue
		}
		shape := shapeText(e.shape, e.dtype)
		if e.count > 1 {
			shape = fmt.Sprintf("%d × %s", e.count, shape)
		}
		lines = append(lines, [4]string{plan.Bytes(e.bytes), e.class.String(), e.name, shape})
	}
	if rest > 0 {
		lines = append(lines, [4]string{plan.Bytes(restBytes), "", fmt.Sprintf("%d smaller ones", rest), ""})
	}
	for _, l := range lines {
		for i := range l {
			widest[i] = max(widest[i], utf8.RuneCountInString(l[i]))
		}
	}
	const gap = 2
	room := max(16, cli.Terminal-4*gap-widest[0]-widest[1]-widest[3])
	tw := tabwriter.NewWriter(w, 0, 0, gap, ' ', 0)
	for _, l := range lines {
		fmt.Fprintf(tw, "  %s\t%s\t%s\t%s\n", l[0], l[1], ending(l[2], room), l[3])
	}
	tw.Flush()
	fmt.Fprintln(w)
}

// ending returns the last n characters of a longer name: the place within a layer is more useful
// than the common prefix of all layers' names.
func ending(name string, n int) string {
	if long := []rune(name); len(long) > n {
		return "…" + string(long[len(long)-n+1:])
	}
	return name
}

func (r *planReport) waysOut(w io.Writer) {
	if r.asked.Fits {
		return
	}
	if len(r.ways) == 0 {
		cli.Wrap(w, "", "", r.nothing())
		return
	}
	for _, list := range r.wayLists() {
		cli.Wrap(w, "", "  ", list.title+", the cheapest first (each was planned and fits)")
		for _, way := range list.ways {
			cli.WrapFlags(w, "  ", "    ", cli.FlagText(way.Changes))
			cli.Wrap(w, "      ", "        ", r.wayText(way))
			if way.Note != "" {
				cli.Wrap(w, "      ", "        ", "auto: "+cli.Flagged(way.Note))
			}
		}
	}
}

// wayText describes the effects and the cost of a way out.
func (r *planReport) wayText(way planner.Way) string {
	var parts []string
	for s := range graph.NumSpaces {
		asked, use := r.asked.Plan.Layout.Spaces[s].Peak, way.Forecast.Plan.Layout.Spaces[s].Peak
		switch {
		case s == graph.Device, use-asked >= 1<<20, asked-use >= 1<<20:
			sign, by := "+", use-asked
			if by < 0 {
				sign, by = "−", -by
			}
			parts = append(parts, fmt.Sprintf("%s %s (%s%s)", s, plan.Bytes(use), sign, plan.Bytes(by)))
		}
	}
	parts = append(parts,
		fmt.Sprintf("step %s, %.2f × the time a token of a rank", r.flags.step(way.Forecast), way.Slowdown),
		"sends "+plan.Bytes(way.Forecast.Plan.CommBytes))
	if way.Cost != "" {
		parts = append(parts, "costs "+way.Cost)
	}
	return strings.Join(parts, "; ")
}
