package main

import (
	"errors"
	"fmt"
	"slices"

	devcuda "github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/graph"
)

// apart gives, for each product that has an epilogue, the two separate operations that it replaces,
// on the same operands and workspace.
var apart = map[graph.Kind]func(op graph.Op) [2]graph.Op{
	graph.LinearAct: func(op graph.Op) [2]graph.Op {
		a := op.Attr.(graph.LinearAttr)
		product, activation := op, op
		pre := op.Out[1].Buf
		product.Kind, product.Out, product.Attr = graph.Linear, []graph.Out{{Buf: pre}}, graph.LinearAttr{TransW: a.TransW}
		activation.Kind, activation.In, activation.Out, activation.Attr = graph.Activation, []graph.BufID{pre}, op.Out[:1], graph.ActAttr{Act: a.Act}
		return [2]graph.Op{product, activation}
	},
	graph.LinearGradAct: func(op graph.Op) [2]graph.Op {
		a := op.Attr.(graph.LinearAttr)
		product, derivative := op, op
		product.Kind, product.In, product.Attr = graph.LinearGradX, op.In[:2], graph.LinearAttr{TransW: a.TransW}
		to := op.Out[0].Buf
		derivative.Kind, derivative.In, derivative.Attr = graph.ActivationGrad, []graph.BufID{to, op.In[2]}, graph.ActAttr{Act: a.Act}
		derivative.Out = []graph.Out{{Buf: to, Mode: graph.ReadWrite}}
		return [2]graph.Op{product, derivative}
	},
	graph.LinearGradWB: func(op graph.Op) [2]graph.Op {
		product, sums := op, op
		product.Kind, product.Out = graph.LinearGradW, op.Out[:1]
		sums.Kind, sums.In, sums.Out, sums.Attr = graph.BiasGrad, op.In[1:2], op.Out[1:2], nil
		return [2]graph.Op{product, sums}
	},
}

// beside times the products that have an epilogue, and for each the two operations that it
// replaces. Its plan has all of them.
func (m *micros) beside() error {
	m.products.list = nil // lies where the plan before was
	err := m.allocate()
	if err == nil {
		seen := map[string]bool{}
		for _, s := range m.plan.Program.Sections {
			for _, ph := range s.Phases {
				for i := range ph.Ops {
					op := &ph.Ops[i]
					if what := m.describe(op); apart[op.Kind] != nil && !seen[what] {
						seen[what] = true
						m.sideBySide(op, what)
					}
				}
			}
		}
		m.algorithms()
	}
	return errors.Join(err, m.free())
}

func (m *micros) sideBySide(op *graph.Op, what string) {
	r := microRow{Shape: m.shape, Precision: m.precision, Op: what}
	defer func() { m.row(r) }()
	joined := m.products.joined
	one, err := m.seconds(*op)
	r.ByKernels = m.products.joined == joined
	if err == nil {
		var two float64
		parts := apart[op.Kind](*op)
		two, err = m.seconds(parts[0], parts[1])
		r.Micros, r.Apart = one*1e6, two*1e6
	}
	if err != nil {
		r.Micros, r.Apart, r.Error = 0, 0, err.Error()
	}
}

// seconds times operations launched one after another.
func (m *micros) seconds(ops ...graph.Op) (float64, error) {
	var run []devcuda.Kernel
	for i := range ops {
		k, err := m.lib.Bind(m.binding(&ops[i]))
		if err != nil {
			return 0, err
		}
		gpu, ok := k.(devcuda.Kernel)
		if !ok {
			return 0, fmt.Errorf("%s is a %T, want a kernel of the GPU", ops[i].Kind, k)
		}
		run = append(run, gpu)
	}
	return m.inARow(run...)
}

// inARow times kernels launched one after another, repeated often enough for an event's resolution.
func (m *micros) inARow(kernels ...devcuda.Kernel) (float64, error) {
	d, err := m.timed(func() error {
		for range inARow {
			for _, k := range kernels {
				if err := k.Enqueue(m.api, m.stream); err != nil {
					return err
				}
			}
		}
		return nil
	})
	return max(d.Seconds()/inARow, 1e-12), err
}

// besideTable shows the time that epilogues save.
func besideTable(rows []microRow) (table [][]string) {
	for _, r := range slices.DeleteFunc(slices.Clone(rows), func(r microRow) bool { return r.Apart == 0 }) {
		how := "in the product's epilogue"
		if r.ByKernels {
			how = "by kernels: the library has no such algorithm, or not for these shapes"
		}
		table = append(table, []string{r.Shape, r.Precision, r.Op + ", " + how, fmt.Sprintf("%.1f, apart %.1f", r.Micros, r.Apart), "", "", "", ""})
	}
	return table
}
