package planning

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/dustin/go-humanize/english"
	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/mesh"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/planner"
)

// topic is a value of --ask: the setting to search for.
type topic struct {
	name, flag string // the value of --ask, and the flag that sets the answer
	what       string // as "fewest GPUs"
	// values returns the candidates, in the order of the memory that they need.
	values func(c *config.Config) []int64
	easier bool // later values need less
	set    func(c *config.Config, v int64)
	clash  []string // flags that contradict the question
	bytes  bool
}

// mostAsked bounds the candidates of topics without another bound.
const mostAsked = 1 << 15

// seqStep is the step between candidates of --ask seq, in tokens.
const seqStep = 64

func upTo(n, step int64) (list []int64) {
	for v := step; v <= n; v += step {
		list = append(list, v)
	}
	return list
}

// sizes returns amounts of memory 1 to 2 % apart, from 1 MiB to 4 TiB: whole MiB from 64 MiB on,
// multiples of 16 KiB below.
func sizes(*config.Config) (list []int64) {
	for v, step := int64(1<<20), int64(16<<10); v <= 4<<40; v += step {
		if v >= 128*step {
			step *= 2
		}
		list = append(list, v)
	}
	return list
}

var topics = []topic{
	{"gpus", "ranks", "fewest GPUs", func(c *config.Config) []int64 {
		return upTo(mostAsked, int64(max(c.Tensor, 1)*max(c.Pipeline, 1)))
	}, true,
		func(c *config.Config, v int64) { c.Ranks = int(v) },
		[]string{"ranks", "nodes", "gpus-per-node", "shard-size", "global-batch", "rank-shares", "batch-schedule"},
		false},
	{"model", "model", "largest preset", presets, false,
		func(c *config.Config, v int64) { c.Model = bySize()[v].Name }, []string{"model"}, false},
	{"batch", "batch", "largest micro-batch", func(*config.Config) []int64 { return upTo(mostAsked, 1) }, false,
		func(c *config.Config, v int64) { c.Batch = int(v) },
		[]string{"batch", "global-batch", "batch-schedule"}, false},
	{"seq", "seq", "longest rows", nil, false,
		func(c *config.Config, v int64) { c.Seq = int(v) }, []string{"seq"}, false},
	{"device-memory", "device-memory", "least device memory", sizes, true,
		func(c *config.Config, v int64) { c.DeviceMemory = v }, []string{"device-memory"}, true},
	{"host-memory", "host-memory", "least host memory", sizes, true,
		func(c *config.Config, v int64) { c.HostMemory = v }, []string{"host-memory", "node-memory"}, true},
}

// bySize returns the presets of language models, the smallest first. Counting parameters builds
// each model, so they are sorted only once.
var bySize = sync.OnceValue(func() []model.Preset {
	list := model.Presets()
	count := map[string]int64{}
	for _, p := range list {
		count[p.Name] = parameters(p.Config)
	}
	slices.SortStableFunc(list, func(a, b model.Preset) int { return cmp.Compare(count[a.Name], count[b.Name]) })
	return list
})

// presets returns the indexes in bySize of presets whose positions suffice for the rows of a
// configuration, and whose layers its mesh divides.
func presets(c *config.Config) (list []int64) {
	for i, p := range bySize() {
		if p.Config.Positions >= c.Seq && divides(c, p.Config) {
			list = append(list, int64(i))
		}
	}
	return list
}

// divides reports whether tensor and pipeline ranks can divide a model.
func divides(c *config.Config, m model.Config) bool {
	if m.Layers < c.Pipeline {
		return false
	}
	if c.Slices() == 0 {
		return true
	}
	m.Layers = 1
	p, err := model.Build(m, model.Train, 1, 8)
	if err == nil {
		_, err = mesh.Tensor(p, mesh.Options{Axis: -1, Slices: c.Slices()})
	}
	return err == nil
}

// undivided returns the names of presets with enough positions that the mesh does not divide.
func undivided(c *config.Config) (names []string) {
	for _, p := range bySize() {
		if p.Config.Positions >= c.Seq && !divides(c, p.Config) {
			names = append(names, p.Name)
		}
	}
	return names
}

// parameters counts the parameters of a preset, whose layers are alike.
func parameters(c model.Config) int64 {
	of := func(layers int) (n int64) {
		c.Layers = layers
		p, err := model.Build(c, model.Train, 1, 8)
		if err != nil {
			return 0
		}
		for i := range p.Tensors() {
			n += p.Params[i].Elems()
		}
		return n
	}
	layers := c.Layers
	one, two := of(1), of(2)
	return one + int64(layers-1)*(two-one)
}

// topicOf returns the topic of --ask, and rejects flags that contradict it. It is called before
// Settle.
func (f *Flags) topicOf(fs *pflag.FlagSet, c *config.Config) (*topic, error) {
	if !fs.Changed("ask") {
		return nil, nil
	}
	k := slices.IndexFunc(topics, func(t topic) bool { return strings.EqualFold(t.name, f.ask) })
	if k < 0 {
		return nil, fmt.Errorf("--ask %q: ask for gpus, model, batch, seq, device-memory or host-memory", f.ask)
	}
	for _, flag := range topics[k].clash {
		if fs.Changed(flag) {
			return nil, fmt.Errorf("--ask %s with --%s: the flag says what is asked for; leave one of them out",
				topics[k].name, flag)
		}
	}
	for _, flag := range []string{"dump", "emit"} {
		if fs.Changed(flag) {
			return nil, fmt.Errorf("--ask %s with --%s: ask first, then give --%s with the flags of the answer",
				topics[k].name, flag, flag)
		}
	}
	switch topics[k].name {
	case "model":
		c.Model = bySize()[0].Name
	case "gpus":
		c.Ranks = max(c.Tensor, 1) * max(c.Pipeline, 1)
	}
	if !fs.Changed("effort") {
		f.effort, f.eachAlone = planner.AskEffort, true
	}
	return &topics[k], nil
}

// askedEffort is an --effort that suffices for most questions, over all searches.
const askedEffort = 1000

// askedAt returns the configuration with value v, and the flags as if v had been given.
func (f *Flags) askedAt(c config.Config, t *topic, v int64) (config.Config, *Flags) {
	own := *f
	t.set(&c, v)
	if t.name == "gpus" {
		own.fillServers(&c)
	}
	return c.Sharing(), &own
}

// answerTo answers --ask, and returns the configuration and the plan of the answer.
func (f *Flags) answerTo(ctx context.Context, t *topic, c config.Config, fixed planner.Fixed, rows int) (
	config.Config, *planner.Fitted, error,
) {
	values, err := t.all(&c)
	if err != nil {
		return c, nil, err
	}
	at := func(i int) (planner.Request, planner.Hardware) {
		one, own := f.askedAt(c, t, values[i])
		return own.request(one), own.Hardware(&one)
	}
	f.progress.Says("looking for the " + t.what + " …")
	a, err := planner.Ask(ctx, planner.Question{Count: len(values), Easier: t.easier, Ranks: t.name == "gpus", At: at,
		Fixed: fixed, Rows: rows})
	switch {
	case planner.UsedUp(err):
		return c, nil, fmt.Errorf("--effort %d: the plans were used up before --ask %s was answered; "+
			"leave it out, or give --effort %d", f.effort, t.name, max(askedEffort, 4*f.effort))
	case err != nil:
		return c, nil, err
	}
	switch last := len(values) - 1; {
	case a.Value < 0 && t.name == "gpus" && a.Neighbour != last:
		return c, nil, fmt.Errorf("--ask gpus: none of %d numbers up to %s fits; the nearest is %s: %w", a.Looked,
			t.text(values[last]), t.text(values[a.Neighbour]), a.None)
	case a.Value < 0:
		return c, nil, fmt.Errorf("--ask %s: not even %s fits: %w", t.name, t.text(values[a.Neighbour]), a.None)
	}
	c, own := f.askedAt(c, t, values[a.Value])
	f.nodeSize, f.seqGiven = own.nodeSize, f.seqGiven || t.name == "seq"
	value := t.text(values[a.Value])
	out := &Answer{Ask: t.name, Value: t.value(values[a.Value]), Plan: f.stageJSON(a.Best.Forecast),
		Flags: fmt.Sprintf("--%s %s %s", t.flag, value, cli.FlagText(a.Best.Choices))}
	out.given = []string{"--" + t.flag, value}
	out.first = fmt.Sprintf("%s that fits: %s", t.what, value)
	if t.name == "gpus" || t.name == "seq" {
		out.first = t.what + " that fit: " + value
	}
	out.lines = append(out.lines, fmt.Sprintf("%s a step and %s by prediction",
		f.seconds(a.Best.Forecast, a.Best.Step.Seconds), f.speed(a.Best.Forecast)))
	if budget := f.budgetText(a.Best.Forecast); budget != "" {
		out.lines = append(out.lines, budget)
	}
	if a.Neighbour < 0 {
		out.lines = append(out.lines, fmt.Sprintf("%s is the last value there is", value))
	} else {
		v := values[a.Neighbour]
		out.Neighbour = &Neighbour{Value: t.value(v)}
		if near := a.None.Smallest; near != nil {
			st := f.stageJSON(near)
			out.Neighbour.Plan = &st
		}
		out.lines = append(out.lines, fmt.Sprintf("%s: %s", t.text(v), shortfall(a.None)))
	}
	if t.name == "model" {
		if names := undivided(&c); len(names) > 0 {
			out.lines = append(out.lines, "left out, since tensor and pipeline ranks cannot divide them: "+
				strings.Join(names, ", "))
		}
	}
	f.answer = out
	return c, a.Best, nil
}

// shortfall describes the memory that the nearest plan of a value lacks. It is no proof that none
// fits.
func shortfall(none *planner.NothingFits) string {
	if none.Smallest == nil {
		return cli.Flagged(none.Error())
	}
	return fmt.Sprintf("none of %s tried fits; the nearest %s", english.Plural(none.Tried, "plan", ""),
		planner.Shortfall(none.Smallest))
}

// all returns the candidates for a configuration.
func (t *topic) all(c *config.Config) ([]int64, error) {
	if t.values != nil {
		return t.values(c), nil
	}
	m, err := planner.ModelConfig(c.Model)
	if err != nil {
		return nil, err
	}
	if m.Positions < seqStep {
		return upTo(int64(m.Positions), 1), nil
	}
	return upTo(int64(m.Positions), seqStep), nil
}

// value returns a value for JSON; text returns it for a flag.
func (t *topic) value(v int64) any {
	if t.name == "model" {
		return bySize()[v].Name
	}
	return v
}

func (t *topic) text(v int64) string {
	switch {
	case t.name == "model":
		return bySize()[v].Name
	case t.bytes:
		return cli.SizeText(v)
	}
	return strconv.FormatInt(v, 10)
}

// print prints the answer.
func (a *Answer) print(w io.Writer) {
	fmt.Fprintln(w, a.first)
	cli.WrapFlags(w, "  ", "    ", a.Flags)
	for _, line := range a.lines {
		cli.Wrap(w, "  ", "    ", line)
	}
	fmt.Fprintln(w)
}
