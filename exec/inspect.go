package exec

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// NonFinite describes the first value, in program order, that is NaN or infinite.
type NonFinite struct {
	Rank   int
	Phase  string // phase of the section; Repeat is its repetition, from 0
	Repeat int
	At     int // position of the operation in the order in which the section ran
	Op     *graph.Op
	Buffer string // the output that the operation wrote it to
	Loss   bool   // Buffer is the program's Loss
	// Input is an input of the operation that was already not finite. No operation of the
	// section wrote it, so it is a resident state. "" for none.
	Input string
	Elem  int64 // index of the element in Buffer
	Value float64
}

// FindNonFinite runs a section again, one operation at a time, up to the update phase. It returns
// the first operation that wrote a value that is NaN or infinite; nil if there is none. It skips
// operations that would change the units' resident states. It does not check operations that belong
// to the update of the previous step.
//
// It is for a step that has failed, since it is slow: it waits for every operation and reads
// every output through the staging buffer. All ranks must call it together.
func (e *Executor) FindNonFinite(name string, before func(phase *graph.Phase, repeat int) error) (*NonFinite, error) {
	s, err := e.section(name)
	if err != nil {
		return nil, err
	}
	e.current.Store(s)
	resident := residents(e.cfg.Program)
	var found *NonFinite
	at := 0
	for i := range s.phases {
		ph := &s.phases[i]
		if ph.graph.Kind == graph.UpdatePhase {
			break
		}
		for r := range e.times(ph) {
			if err := e.prepare(ph, r, before); err != nil {
				return nil, err
			}
			for k := range ph.ops {
				o := ph.ops[k]
				o.release = nil // poisoning would count as a computed NaN
				if o.alone != nil {
					o.kernel = o.alone
				}
				at++
				if writesAny(e.cfg.Program, o.op, resident) {
					o.kernel = nil
				}
				if err := e.enqueue([]operation{o}); err != nil {
					return nil, err
				}
				if found != nil || o.kernel == nil || o.op.Pass == graph.Update {
					continue // keep running: the collectives need this rank
				}
				if err := e.Sync(); err != nil {
					return nil, err
				}
				e.current.Store(s)
				if found, err = e.scanOutputs(o.op); err != nil {
					return nil, err
				}
				if found != nil {
					found.Phase, found.Repeat, found.At = ph.graph.Name, r, at
				}
			}
		}
	}
	return found, e.Sync()
}

// scanOutputs checks the outputs of an operation. Collectives and copies of flat parameters and
// gradients also move padding, which no operation reads. In these buffers it checks only the
// segments of parameters.
func (e *Executor) scanOutputs(op *graph.Op) (*NonFinite, error) {
	p := e.cfg.Program
	for _, o := range op.Out {
		i, v, err := e.scan(op, o.Buf)
		if err != nil {
			return nil, err
		}
		if i < 0 {
			continue
		}
		found := &NonFinite{Rank: e.rank, Op: op, Buffer: p.Buf(o.Buf).Name, Loss: isLoss(p, op, o.Buf), Elem: i, Value: v}
		outputs := map[graph.BufID]bool{}
		for _, o := range op.Out {
			if o.Buf != graph.NoBuf {
				r, _ := p.Resolve(o.Buf, nil)
				outputs[r] = true
			}
		}
		for _, in := range op.In {
			if in == graph.NoBuf {
				continue
			}
			if r, _ := p.Resolve(in, nil); outputs[r] {
				continue // changed in place
			}
			if k, _, err := e.scan(op, in); err != nil {
				return nil, err
			} else if k >= 0 {
				found.Input = p.Buf(in).Name
				break
			}
		}
		return found, nil
	}
	return nil, nil
}

// isLoss says whether an operation's output is the step's loss, or the loss of a micro-batch that
// is added to it.
func isLoss(p *graph.Program, op *graph.Op, out graph.BufID) bool {
	switch op.Kind {
	case graph.CrossEntropy, graph.HeadLoss, graph.HeadLossGrad:
		return out == op.Out[0].Buf
	}
	return out == p.Loss
}

// computed says whether element i of a buffer that op wrote is not padding.
func (e *Executor) computed(op *graph.Op, id graph.BufID, i int64) bool {
	switch op.Kind {
	case graph.Copy, graph.AllGather, graph.ReduceScatter, graph.AllReduce, graph.AllToAll, graph.SumParts:
	default:
		return true
	}
	if op.Unit < 0 || op.Unit >= len(e.cfg.Program.Units) {
		return true
	}
	u := &e.cfg.Program.Units[op.Unit]
	n := e.cfg.Program.Buf(id).Elems()
	if n > u.FlatLen || u.FlatLen == 0 {
		return true
	}
	// The buffer is a complete flat parameter, or this rank's shard of one.
	flat := i
	if attr, ok := op.Attr.(graph.GroupAttr); ok && n < u.FlatLen && attr.Axis >= 0 {
		flat += int64(e.cfg.Coord[attr.Axis]) * n
	}
	return slices.ContainsFunc(u.Segments, func(s graph.Segment) bool { return flat >= s.Flat && flat < s.Flat+s.Len })
}

// scan returns the index and value of the first element of a floating-point operand that is NaN
// or infinite; −1 if there is none, or if the operand has no floating-point elements.
func (e *Executor) scan(op *graph.Op, id graph.BufID) (int64, float64, error) {
	if id == graph.NoBuf {
		return -1, 0, nil
	}
	b := e.cfg.Program.Buf(id)
	var value func([]byte) float64
	switch b.DType {
	case graph.F32:
		value = func(v []byte) float64 { return float64(math.Float32frombits(binary.LittleEndian.Uint32(v))) }
	case graph.F64:
		value = func(v []byte) float64 { return math.Float64frombits(binary.LittleEndian.Uint64(v)) }
	case graph.BF16:
		value = func(v []byte) float64 {
			return float64(math.Float32frombits(uint32(binary.LittleEndian.Uint16(v)) << 16))
		}
	case graph.F16:
		value = halfRange
	default:
		return -1, 0, nil
	}
	size := b.DType.Size()
	chunk := make([]byte, min(b.Bytes(), scanBytes))
	for off := int64(0); off < b.Bytes(); off += int64(len(chunk)) {
		part := chunk[:min(int64(len(chunk)), b.Bytes()-off)]
		if err := e.Read(id, off, part); err != nil {
			return -1, 0, fmt.Errorf("inspect: %w", err)
		}
		for k := int64(0); k < int64(len(part)); k += size {
			if v := value(part[k:]); (math.IsNaN(v) || math.IsInf(v, 0)) && e.computed(op, id, (off+k)/size) {
				return (off + k) / size, v, nil
			}
		}
	}
	return -1, 0, nil
}

// scanBytes is the number of bytes that are checked at a time, a multiple of every element size.
const scanBytes = 1 << 20

// halfRange returns NaN or ±Inf for a 16-bit float with that value, and 0 for any finite value.
func halfRange(v []byte) float64 {
	h := binary.LittleEndian.Uint16(v)
	switch {
	case h&0x7c00 != 0x7c00:
		return 0
	case h&0x03ff != 0:
		return math.NaN()
	case h&0x8000 != 0:
		return math.Inf(-1)
	}
	return math.Inf(1)
}
