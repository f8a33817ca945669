package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
	"unsafe"

	"github.com/spillway-ml/spillway/device"
	devcuda "github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
)

// kernelRow is the share of a step that a kernel, or a product of one shape, takes.
type kernelRow struct {
	Kernel   string  `json:"kernel"`
	Launches int     `json:"launches"` // in a step of the whole model
	Micros   float64 `json:"us"`       // of all of them
	Error    string  `json:"error,omitempty"`
}

// clocked is a driver that records events before and after each launch on a stream.
type clocked struct {
	driver.API
	names  map[driver.Function]string
	on     bool
	events []driver.Event // two per launch
	heard  []string       // kernels launched since timing began
}

func (c *clocked) Function(m driver.Module, name string) (driver.Function, error) {
	f, err := c.API.Function(m, name)
	c.names[f] = name
	return f, err
}

func (c *clocked) Launch(f driver.Function, grid, block driver.Dim, shared int, s driver.Stream, params unsafe.Pointer, size uintptr) error {
	return c.between(c.names[f], s, func() error { return c.API.Launch(f, grid, block, shared, s, params, size) })
}

func (c *clocked) Fill8(at driver.Address, v byte, n int64, s driver.Stream) error {
	return c.between("cuMemsetD8Async", s, func() error { return c.API.Fill8(at, v, n, s) })
}

func (c *clocked) Fill32(at driver.Address, v uint32, n int64, s driver.Stream) error {
	return c.between("cuMemsetD32Async", s, func() error { return c.API.Fill32(at, v, n, s) })
}

func (c *clocked) CopyOnDevice(dst, src driver.Address, n int64, s driver.Stream) error {
	return c.between("cuMemcpyDtoDAsync", s, func() error { return c.API.CopyOnDevice(dst, src, n, s) })
}

func (c *clocked) between(name string, s driver.Stream, f func() error) error {
	if !c.on {
		return f()
	}
	at := 2 * len(c.heard)
	for len(c.events) < at+2 {
		e, err := c.API.NewEvent(true)
		if err != nil {
			return err
		}
		c.events = append(c.events, e)
	}
	c.heard = append(c.heard, name)
	return errors.Join(c.API.Record(c.events[at], s), f(), c.API.Record(c.events[at+1], s))
}

// times runs a kernel the given number of times and returns the median time of each of its launches
// in µs.
func (c *clocked) times(k devcuda.Kernel, s driver.Stream, runs int) ([]float64, error) {
	all := make([][]float64, 0, runs)
	for range runs {
		c.heard, c.on = c.heard[:0], true
		err := k.Enqueue(c, s)
		c.on = false
		if err = errors.Join(err, c.API.Synchronize(s)); err != nil {
			return nil, err
		}
		var one []float64
		for i := range c.heard {
			ms, err := c.API.Elapsed(c.events[2*i], c.events[2*i+1])
			if err != nil {
				return nil, err
			}
			one = append(one, 1e3*float64(ms))
		}
		all = append(all, one)
	}
	each := make([]float64, len(c.heard))
	for i := range each {
		var v []float64
		for _, one := range all {
			v = append(v, one[i])
		}
		slices.Sort(v)
		each[i] = v[len(v)/2]
	}
	return each, nil
}

func (c *clocked) close() (err error) {
	for _, e := range c.events {
		err = errors.Join(err, c.API.DestroyEvent(e))
	}
	return err
}

// clockedProducts records events around the library's products too.
type clockedProducts struct {
	blas.Library
	c *clocked
}

func (l clockedProducts) Bind(p blas.Product, at blas.Places) (blas.Call, error) {
	call, err := l.Library.Bind(p, at)
	return clockedCall{call, l.c, "cuBLASLt " + p.String()}, err
}

type clockedCall struct {
	blas.Call
	c    *clocked
	name string
}

func (k clockedCall) Enqueue(s driver.Stream) error {
	return k.c.between(k.name, s, func() error { return k.Call.Enqueue(s) })
}

// ofStep visits the launches of a step of the plan; two operations that run as one are visited
// together.
func (m *micros) ofStep(visit func(what string, ops ...*graph.Op)) error {
	var wrong error
	for _, section := range m.plan.Program.Sections {
		if section.Kind != graph.SectionStep {
			continue
		}
		for _, phase := range section.Phases {
			ops := phase.Ops
			with := make([]int, len(ops)) // 1 + the second of a pair; −1: it is one
			graph.Pairs(ops, graph.Compute, func(i, j int) bool {
				k, err := m.lib.Join(m.binding(&ops[i]), m.binding(&ops[j]))
				wrong = errors.Join(wrong, err)
				if k == nil || err != nil {
					return false
				}
				with[i], with[j] = 1+j, -1
				return true
			})
			for i := range ops {
				switch {
				case transfers(ops[i].Kind) || with[i] < 0:
				case with[i] > 0:
					second := &ops[with[i]-1]
					visit(m.describe(&ops[i])+", "+m.describe(second), &ops[i], second)
				default:
					visit(m.describe(&ops[i]), &ops[i])
				}
			}
		}
	}
	return wrong
}

// counts returns how often a step of the complete model launches each operation. It runs nothing.
func (m *micros) counts(layers int) (map[string]int, error) {
	some := m.plan
	defer func() { m.plan, m.arenas = some, [graph.NumSpaces]*memory{} }()
	var err error
	if m.plan, err = microPlan(m.shape, m.precision, layers, 0); err != nil {
		return nil, err
	}
	for s := range graph.NumSpaces { // where operands would lie
		m.arenas[s] = &memory{space: s, size: m.plan.Layout.Spaces[s].Peak, at: driver.Address(1+s) << 44}
	}
	counts := map[string]int{}
	err = m.ofStep(func(what string, _ ...*graph.Op) { counts[what]++ })
	return counts, err
}

// breakdown times each launch of the operations of two layers, and reports for each kernel the time
// of its launches in a step of the complete model.
func (m *micros) breakdown(c *clocked, tell func(kernelRow)) error {
	counts, err := m.counts(microShapes[m.shape].layers)
	if err != nil {
		return err
	}
	if err := m.allocate(); err != nil {
		return errors.Join(err, m.free())
	}
	rows := map[string]*kernelRow{}
	err = m.ofStep(func(what string, ops ...*graph.Op) {
		n := counts[what]
		if n == 0 {
			return // it was seen
		}
		delete(counts, what)
		var k device.Kernel
		var err error
		if len(ops) == 2 {
			k, err = m.lib.Join(m.binding(ops[0]), m.binding(ops[1]))
		} else {
			k, err = m.lib.Bind(m.binding(ops[0]))
		}
		gpu, ok := k.(devcuda.Kernel)
		if err == nil && !ok {
			return // on the host
		}
		var each []float64
		if err == nil {
			each, err = c.times(gpu, m.stream, 3)
		}
		if err != nil {
			tell(kernelRow{Kernel: what, Error: err.Error()})
			return
		}
		for i, us := range each {
			r := rows[c.heard[i]]
			if r == nil {
				r = &kernelRow{Kernel: c.heard[i]}
				rows[r.Kernel] = r
			}
			r.Launches, r.Micros = r.Launches+n, r.Micros+float64(n)*us
		}
	})
	for _, r := range rows {
		tell(*r)
	}
	for what, n := range counts {
		tell(kernelRow{Kernel: what, Launches: n, Error: "two layers do not have it: not timed"})
	}
	return errors.Join(err, m.free())
}

// breakdownChild runs in the child process, for one shape and precision.
func breakdownChild(out io.Writer, c contacts, host kernels.Library, shape, prec string) error {
	t := &clocked{API: c.api, names: map[driver.Function]string{}}
	products := c.products
	c.api = t
	c.products = func() (blas.Library, error) {
		l, err := products()
		return clockedProducts{l, t}, err
	}
	lines := json.NewEncoder(out)
	return withMicros(c, host, shape, prec, func(m *micros) error {
		return errors.Join(m.breakdown(t, func(r kernelRow) { _ = lines.Encode(r) }), t.close()) // a closed pipe has no reader
	})
}

// breakdownLimit is the child's time limit.
const breakdownLimit = 45 * time.Second

// breakdown reports how a step's time is divided among kernels. A child process times each launch
// of the step's operations alone, between events.
func (b *bundle) breakdown(ctx context.Context, r *result, shape string, stepSeconds float64) {
	if b.gpu == nil || ctx.Err() != nil {
		return
	}
	o := b.within(ctx, breakdownLimit, "breakdown-"+shape, b.work, oneGPU(), b.self, "-child", "breakdown", "-shape", shape, "-precision", "bf16")
	rows, lines := kernelTable(o.out, stepSeconds)
	for _, l := range lines {
		r.say("%s", l)
	}
	if o.status != 0 {
		r.say("the breakdown %s (logs/breakdown-%s.txt)", shorten(o.ended(), 300), shape)
	}
	r.Table = append(r.Table, rows...)
}

// mostKernels is the number of kernels in a breakdown's table.
const mostKernels = 16

// kernelTable returns a breakdown's table in the columns of speedTable, longest first, and remarks
// about it.
func kernelTable(text []byte, stepSeconds float64) (table [][]string, say []string) {
	all := map[string]kernelRow{}
	for line := range bytes.Lines(text) {
		var k kernelRow
		if json.Unmarshal(line, &k) == nil && k.Kernel != "" {
			all[k.Kernel] = k
		}
	}
	rows := slices.SortedFunc(maps.Values(all), func(a, b kernelRow) int {
		return cmp.Or(cmp.Compare(b.Micros, a.Micros), strings.Compare(a.Kernel, b.Kernel))
	})
	total := 0.0
	for _, k := range rows {
		total += k.Micros
		if k.Error != "" {
			say = append(say, fmt.Sprintf("breakdown, %s: %s", shorten(k.Kernel, 120), shorten(k.Error, 200)))
		}
	}
	if total == 0 {
		return nil, append(say, "no breakdown: no kernel was timed")
	}
	say = append(say, fmt.Sprintf("bf16, by kernel, each launch alone between events: %.2f ms a step, of the step's %.2f ms", total/1e3, 1e3*stepSeconds))
	table = append(table, []string{"**kernel**", "**launches a step**", "**ms a step**", "**µs a launch**", "**share**"})
	for _, k := range rows[:min(len(rows), mostKernels)] {
		if k.Micros > 0 {
			table = append(table, []string{cell(shorten(k.Kernel, 80)), number(k.Launches), fmt.Sprintf("%.2f", k.Micros/1e3), fmt.Sprintf("%.1f", k.Micros/float64(k.Launches)), fmt.Sprintf("%.1f %%", 100*k.Micros/total)})
		}
	}
	return table, say
}
