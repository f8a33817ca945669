package algo

import (
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// Options of a Group.
type Options struct {
	Algorithm Name
	// PerHost is the number of consecutive ranks of the group that share a host: see
	// Rounds. 0 means 1.
	PerHost int
	// Scratch is memory of the rank that peers can reach through the transport. It holds
	// copies where an algorithm may not overwrite an operand: inputs of a reduce-scatter, and
	// sums of 16-bit floats, which are sent as f32. ScratchBytes is a good size.
	Scratch device.Ptr
	// Link is the cost model with which Auto chooses. With the zero Link, Auto chooses
	// Direct, the transport's own implementation.
	Link Link
	// Table holds measurements, which Auto prefers to estimates from Link.
	Table Table
}

// ScratchBytes is the memory that a rank needs in addition to its arenas for algorithms
// other than Direct.
const ScratchBytes = 4 << 20

// Group runs all-gathers, reduce-scatters and all-reduces of a transport's group with the
// chosen algorithm; the transport runs other operations itself. All ranks must use the same
// Options except Scratch, and run one operation at a time.
type Group struct {
	comm.Group
	rounds rounder
	o      Options
	sent   comm.Counter
}

// rounder is a transport's group on the CPU.
type rounder interface {
	Round(label string, sig comm.Signature, name string, vector device.Ptr, round comm.Round) (device.Kernel, error)
}

// Wrap returns a group that runs the collectives of g with the algorithm in Options. For
// Direct it returns g itself.
func Wrap(g comm.Group, o Options) (comm.Group, error) {
	if o.Algorithm == Direct || o.Algorithm == "" || o.Algorithm == Auto && o.Link == (Link{}) {
		return g, nil
	}
	r, ok := g.(rounder)
	if !ok {
		return nil, fmt.Errorf("Config.Collectives %s: %T has its own way alone (direct)", o.Algorithm, g)
	}
	if o.PerHost == 0 {
		o.PerHost = 1
	}
	return &Group{Group: g, rounds: r, o: o}, nil
}

// Stats returns the rank's traffic counts; each round of an algorithm counts as a call.
func (g *Group) Stats() comm.Stats {
	s, own := g.Group.Stats(), g.sent.Stats()
	s.Sent += own.Sent
	return s
}

// choose returns the algorithm for an operation on a buffer of the given size in bytes. Callers use
// Direct for sums in an order other than SumTree, because the algorithms implement only that order.
func (g *Group) choose(op comm.Op, bytes int64) Name {
	if g.o.Algorithm != Auto {
		return g.o.Algorithm
	}
	if a := g.o.Table.Best(op, g.Size(), g.o.PerHost, bytes); a != "" {
		return a
	}
	return g.o.Link.Best(op, g.Size(), g.o.PerHost, bytes)
}

// AllGather copies every rank's shard to all.
func (g *Group) AllGather(label string, shard, full device.Ptr, dtype graph.DType) (device.Kernel, error) {
	k, err := g.Group.AllGather(label, shard, full, dtype) // checks the operands, too
	a := g.choose(comm.AllGather, full.Len)
	if err != nil || a == Direct || g.Size() == 1 {
		return k, err
	}
	sig := comm.Signature{Op: comm.AllGather, Bytes: full.Len, DType: dtype}
	c := g.composite(label, sig, k)
	own := device.Ptr{Arena: full.Arena, Off: full.Off + int64(g.Rank())*shard.Len, Len: shard.Len}
	if own.Off != shard.Off || own.Arena != shard.Arena {
		c.local(func() error { return copyBytes(own, shard) })
	}
	return c.done(c.run(a, full, full.Len/dtype.Size()))
}

// AllReduce replaces buf by its sum over the ranks.
func (g *Group) AllReduce(label string, buf device.Ptr, dtype graph.DType, order graph.SumOrder) (device.Kernel, error) {
	k, err := g.Group.AllReduce(label, buf, dtype, order)
	a := g.choose(comm.AllReduce, buf.Len)
	if err != nil || a == Direct || g.Size() == 1 || order != graph.SumTree {
		return k, err
	}
	sig := comm.Signature{Op: comm.AllReduce, Bytes: buf.Len, DType: dtype}
	c := g.composite(label, sig, k)
	n := buf.Len / dtype.Size()
	if half(dtype) == vec.NoHalf {
		return c.done(c.run(a, buf, n))
	}
	c.sig.DType = graph.F32
	return c.done(c.chunks(n, g.o.Scratch.Len/4, func(at, n int64) error {
		part := device.Ptr{Arena: buf.Arena, Off: buf.Off + 2*at, Len: 2 * n}
		vector := g.scratch(4 * n)
		c.local(func() error { return widen(dtype, vector, part) })
		if err := c.run(a, vector, n); err != nil {
			return err
		}
		c.local(func() error { return narrow(dtype, part, vector, false) })
		return nil
	}))
}

// ReduceScatter sums full over the ranks and gives each its part.
func (g *Group) ReduceScatter(label string, full, shard device.Ptr, dtype graph.DType, order graph.SumOrder, accumulate bool, from ...int) (device.Kernel, error) {
	k, err := g.Group.ReduceScatter(label, full, shard, dtype, order, accumulate, from...)
	a := g.choose(comm.ReduceScatter, full.Len)
	if err != nil || a == Direct || g.Size() == 1 || order != graph.SumTree {
		return k, err
	}
	sig := comm.Signature{Op: comm.ReduceScatter, Bytes: full.Len, DType: dtype, Accumulate: accumulate}
	c := g.composite(label, sig, k)
	size, wide, w := dtype.Size(), dtype.Size(), int64(g.Size())
	if half(dtype) != vec.NoHalf {
		c.sig.DType, wide = graph.F32, 4
	}
	each := shard.Len / size
	return c.done(c.chunks(each, g.o.Scratch.Len/wide/w, func(at, n int64) error {
		vector := g.scratch(wide * n * w)
		part := func(i int64) device.Ptr { return sub(vector, wide*n*i, wide*n) }
		c.local(func() error {
			for i := range w {
				if err := widen(dtype, part(i), sub(full, (each*i+at)*size, n*size)); err != nil {
					return err
				}
			}
			return nil
		})
		if err := c.run(a, vector, n*w); err != nil {
			return err
		}
		c.local(func() error {
			return narrow(dtype, sub(shard, at*size, n*size), part(int64(g.Rank())), accumulate)
		})
		return nil
	}))
}

func sub(p device.Ptr, off, n int64) device.Ptr {
	return device.Ptr{Arena: p.Arena, Off: p.Off + off, Len: n}
}

func (g *Group) scratch(n int64) device.Ptr { return sub(g.o.Scratch, 0, n) }

// composite is an operation as a sequence of rounds, with local copies and sums between
// them.
type composite struct {
	g       *Group
	whole   device.Kernel // the transport's kernel of the operation, used for its label and operands
	sig     comm.Signature
	steps   []func() error
	entered device.Ptr
}

var _ cpu.PeerKernel = (*composite)(nil)

func (g *Group) composite(label string, sig comm.Signature, whole device.Kernel) *composite {
	c := &composite{g: g, whole: whole, sig: sig}
	for _, p := range whole.Touches() {
		c.entered = p
	}
	return c
}

func (c *composite) Label() string         { return c.whole.Label() }
func (c *composite) Touches() []device.Ptr { return c.whole.Touches() }
func (c *composite) ReachesPeers()         {}

// Run runs the operation. It returns when no peer reads the rank's inputs any more.
func (c *composite) Run() error {
	for _, f := range c.steps {
		if err := f(); err != nil {
			return err
		}
	}
	c.g.sent.Add(comm.RingBytes(comm.Signature{Op: c.sig.Op, Bytes: c.sig.Bytes, DType: c.sig.DType}, c.g.Rank(), c.g.Size()), 0, 0)
	return nil
}

func (c *composite) done(err error) (device.Kernel, error) {
	if err != nil {
		return nil, fmt.Errorf("%s %q: %w", c.sig.Op, c.whole.Label(), err)
	}
	return c, nil
}

// local adds a step that works on the rank's own memory only.
func (c *composite) local(f func() error) {
	c.steps = append(c.steps, func() error {
		cpu.Enter(c.entered)
		defer cpu.Leave(c.entered)
		return f()
	})
}

// chunks splits n elements into ranges of at most most elements and calls f for each.
func (c *composite) chunks(n, most int64, f func(at, n int64) error) error {
	if most < 1 {
		return errors.New("no scratch memory for its vectors")
	}
	for at := int64(0); at < n; at += most {
		if err := f(at, min(most, n-at)); err != nil {
			return err
		}
	}
	return nil
}

// run adds the rounds of algorithm a on a vector of n elements.
func (c *composite) run(a Name, vector device.Ptr, n int64) error {
	rounds, err := Rounds(a, c.sig.Op, c.g.Size(), c.g.o.PerHost, n)
	if err != nil {
		return err
	}
	for i, r := range rounds {
		k, err := c.g.rounds.Round(c.whole.Label(), c.sig, fmt.Sprintf("%s %d/%d", a, i+1, len(rounds)), vector, r)
		if err != nil {
			return err
		}
		run, ok := k.(cpu.Kernel)
		if !ok {
			return fmt.Errorf("a round is a %T, want a CPU kernel", k)
		}
		c.steps = append(c.steps, run.Run)
	}
	return nil
}

func half(dtype graph.DType) vec.Half {
	switch dtype {
	case graph.BF16:
		return vec.BF16
	case graph.F16:
		return vec.F16
	}
	return vec.NoHalf
}

func copyBytes(dst, src device.Ptr) error {
	d, err := cpu.Bytes(dst)
	if err != nil {
		return err
	}
	s, err := cpu.Bytes(src)
	if err == nil {
		copy(d, s)
	}
	return err
}

// widen copies src to dst, 16-bit floats as f32.
func widen(dtype graph.DType, dst, src device.Ptr) error {
	as := half(dtype)
	if as == vec.NoHalf {
		return copyBytes(dst, src)
	}
	d, err := cpu.Slice[float32](dst)
	if err != nil {
		return err
	}
	s, err := cpu.Slice[uint16](src)
	if err == nil {
		vec.WidenRow(as, d, s)
	}
	return err
}

// narrow copies f32 src to dst as dtype, rounding once. If accumulate is set, it adds dst's
// old value before rounding.
func narrow(dtype graph.DType, dst, src device.Ptr, accumulate bool) error {
	as := half(dtype)
	if as == vec.NoHalf {
		if !accumulate {
			return copyBytes(dst, src)
		}
		switch dtype {
		case graph.F32:
			return addTo[float32](dst, src)
		case graph.F64:
			return addTo[float64](dst, src)
		}
		return addTo[int64](dst, src)
	}
	s, err := cpu.Slice[float32](src)
	if err != nil {
		return err
	}
	d, err := cpu.Slice[uint16](dst)
	if err != nil {
		return err
	}
	if accumulate {
		var row [1024]float32
		for at := 0; at < len(d); at += len(row) {
			n := min(len(row), len(d)-at)
			vec.WidenRow(as, row[:n], d[at:at+n])
			for i, v := range s[at : at+n] {
				s[at+i] = row[i] + v
			}
		}
	}
	vec.NarrowRow(as, d, s)
	return nil
}

func addTo[T comm.Number](dst, src device.Ptr) error {
	d, err := cpu.Slice[T](dst)
	if err != nil {
		return err
	}
	s, err := cpu.Slice[T](src)
	if err == nil {
		for i, v := range s {
			d[i] += v
		}
	}
	return err
}
