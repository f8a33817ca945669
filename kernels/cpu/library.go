// Package cpu binds the operations of a step program to the CPU's kernels.
//
// Binding checks everything that can be wrong (operands, dtypes, shapes, modes,
// overlaps, workspace) and prepares a kernel whose execution allocates nothing.
// The arithmetic is in the packages below: gemm, attn, vec, exact.
package cpu

import (
	"fmt"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

type library struct{ pool *pool.Pool }

// New returns the kernels of the CPU device. All of them compute on p's
// threads; results do not depend on how many there are.
func New(p *pool.Pool) kernels.Library { return &library{pool: p} }

// binder checks an operation's operands and returns what executes it.
type binder func(b *binding) func() error

// kernel is a bound operation: a device/cpu Kernel.
type kernel struct {
	label   string
	touches []device.Ptr
	skip    []int32 // the predicate; nil: always runs
	body    func() error
}

func (k *kernel) Touches() []device.Ptr { return k.touches }
func (k *kernel) Label() string         { return k.label }

// Run executes the operation, unless its predicate says to skip it.
func (k *kernel) Run() error {
	if k.skip != nil && k.skip[0] != 0 {
		return nil
	}
	if err := k.body(); err != nil {
		return fmt.Errorf("cpu: %s: %w", k.label, err)
	}
	return nil
}

// Bind prepares an operation. It refuses, naming operation and operand, what
// has no kernel, and shapes, dtypes, modes, places and overlaps that the kind
// does not allow. Collectives and copies are the executor's.
func (l *library) Bind(kb kernels.Binding) (device.Kernel, error) {
	if kb.Program == nil || kb.Op == nil {
		return nil, fmt.Errorf("cpu: bind: got no program or no operation")
	}
	bind, ok := binders[kb.Op.Kind]
	if !ok {
		return nil, fmt.Errorf("cpu: bind %s: no kernel for kind %q", kb.Op.Name, kb.Op.Kind)
	}
	b := &binding{Binding: kb, pool: l.pool}
	k := &kernel{label: kb.Op.Name}
	if kb.Op.Skip != graph.NoBuf {
		skip := b.operand("skip", kb.Op.Skip, kb.Skip, graph.I32)
		b.vector(skip, 1)
		k.skip = slice[int32](skip)
		b.all = append(b.all, skip)
	}
	if b.err == nil {
		k.body = bind(b)
	}
	b.checkAliases()
	if b.err != nil {
		return nil, b.err
	}
	for _, o := range b.all {
		if o.ok() {
			k.touches = append(k.touches, o.ptr)
		}
	}
	return k, nil
}
