package run

import (
	"errors"
	"fmt"
	"hash"
	"sort"
	"unsafe"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
	"github.com/spillway-ml/spillway/platform"
)

// States reads and writes resident states by parameter and element, regardless of the ranks that
// hold them. Callers need not know about stages, shards or padding.
type States struct {
	p     *graph.Program
	world platform.World
	local map[int]Holder   // by rank: the ranks that this process reaches
	ranks map[place3][]int // by index along mesh axes: the ranks there, ascending
	tied  map[int][]int    // by parameter: the parameters on other stages with the same value
	where [][]place        // by parameter, in element order

	scales map[graph.BufID]graph.BufID // by state in 8 bits: its scales
}

// Holder moves bytes between the host and one rank's buffers.
type Holder interface {
	Write(buf graph.BufID, off int64, data []byte) error
	Read(buf graph.BufID, off int64, data []byte) error
}

// ErrDiverged marks errors of a run whose loss, gradient norm or update is not finite.
var ErrDiverged = errors.New("the run diverged")

// ErrRemote is the error for a range of a state that only other processes hold.
var ErrRemote = errors.New("held by another process")

// Extent is a run of elements of a parameter's flat state that is contiguous in one buffer. Each of
// its holders has the same bytes.
type Extent struct {
	Buf      graph.BufID
	DType    graph.DType
	Off      int64 // bytes into Buf
	From, To int64 // elements, counted from the start of the requested range
	Holders  []int // ranks of the world, ascending
}

// place3 is a stage of the pipeline and an index along each of two mesh axes; axis −1 and index −1:
// any.
type place3 struct{ stage, axis, index, cutAxis, cutIndex int }

// place is the position of a segment of a parameter in its unit.
type place struct {
	unit int
	seg  graph.Segment
}

// States returns the States of the ranks' program.
func (rs *Ranks) States() *States {
	local := map[int]Holder{}
	for _, r := range rs.list {
		local[r.Index] = r
	}
	return NewStates(rs.plan.Program, rs.World, local)
}

// NewStates returns the States of p in a world; local has the ranks that this process can reach.
func NewStates(p *graph.Program, w platform.World, local map[int]Holder) *States {
	s := &States{p: p, world: w, local: local, where: make([][]place, len(p.Params)), scales: p.Scales(), ranks: map[place3][]int{}, tied: map[int][]int{}}
	for i := range p.Params {
		if of := p.Params[i].TiedTo; of > 0 {
			s.tied[of-1] = append(s.tied[of-1], i)
		}
	}
	for i := range w.Size {
		at := append(comm.Coord(p.Mesh, i), -1) // the last is of axis −1
		stage := 0
		if a := p.AxisOf(graph.PipelineAxis); a >= 0 {
			stage = at[a]
		}
		for a := -1; a < len(p.Mesh); a++ {
			for b := -1; b < len(p.Mesh); b++ {
				key := place3{stage, a, at[(a+len(at))%len(at)], b, at[(b+len(at))%len(at)]}
				s.ranks[key] = append(s.ranks[key], i)
			}
		}
	}
	for u := range p.Units {
		for _, seg := range p.Units[u].Segments {
			s.where[seg.Param] = append(s.where[seg.Param], place{u, seg})
		}
	}
	for _, w := range s.where {
		sort.Slice(w, func(i, j int) bool { return w[i].seg.Start < w[j].seg.Start })
	}
	return s
}

// Float32Bytes returns the memory of v as bytes, without a copy.
func Float32Bytes(v []float32) []byte {
	if len(v) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&v[0])), 4*len(v))
}

// Names lists the states of a parameter: "value" and its optimizer states.
func (s *States) Names(param int) []graph.State {
	w := s.where[param]
	if len(w) == 0 {
		return nil
	}
	u := &s.p.Units[w[0].unit]
	return append([]graph.State{u.Value}, u.States...)
}

// Extents calls visit for each run of elements [start, start+n) of a parameter's flat state, in
// order. Only this method determines which ranks hold which elements.
func (s *States) Extents(param int, name string, start, n int64, visit func(Extent) error) error {
	return s.p.Runs(param, start, n, func(r graph.Run) error { return s.extents(r, name, start, visit) })
}

// copies does the same as Extents for the copies of these elements on other stages of a pipeline.
func (s *States) copies(param int, name string, start, n int64, visit func(Extent) error) error {
	if len(s.tied) == 0 {
		return nil
	}
	return s.p.Runs(param, start, n, func(r graph.Run) error {
		for _, i := range s.tied[r.Param] {
			of := r
			of.Param = i
			if err := s.extents(of, name, start, visit); err != nil {
				return err
			}
		}
		return nil
	})
}

// extents does the same as Extents for a run of elements in one slice; start is the first element
// of the range.
func (s *States) extents(r graph.Run, name string, start int64, visit func(Extent) error) error {
	cut := -1
	if r.Rank >= 0 {
		cut = s.p.Params[r.Param].Split.Axis
	}
	for _, w := range s.where[r.Param] {
		lo, hi := max(r.From, w.seg.Start), min(r.From+r.Len, w.seg.Start+w.seg.Len)
		if lo >= hi {
			continue
		}
		st, err := s.find(w.unit, name)
		if err != nil {
			return err
		}
		to := r.At - start - r.From // from the slice's elements to those of the range
		for lo < hi {
			flat := w.seg.Flat + lo - w.seg.Start
			dt := s.p.Buf(st.Buf).DType
			e := Extent{Buf: st.Buf, DType: dt, Off: flat * dt.Size(), From: lo + to, To: hi + to}
			shard := -1
			if st.Axis >= 0 {
				shard = int(flat / st.Len)
				e.To = min(e.To, e.From+int64(shard+1)*st.Len-flat)
				e.Off = (flat - int64(shard)*st.Len) * dt.Size()
			}
			e.Holders = s.ranks[place3{s.p.Units[w.unit].Stage, st.Axis, shard, cut, r.Rank}]
			if err := visit(e); err != nil {
				return err
			}
			lo = e.To - to
		}
	}
	return nil
}

// reader returns the first holder that this process can reach.
func (s *States) reader(holders []int) (Holder, error) {
	for _, r := range holders {
		if h, ok := s.local[r]; ok {
			return h, nil
		}
	}
	return nil, fmt.Errorf("%w: rank %d", ErrRemote, holders[0])
}

func (s *States) find(unit int, name string) (graph.State, error) {
	u := &s.p.Units[unit]
	for _, st := range append([]graph.State{u.Value}, u.States...) {
		if st.Name == name {
			return st, nil
		}
	}
	return graph.State{}, fmt.Errorf("states: unit %q has no state %q", u.Name, name)
}

// Write sets elements [start, start+len(v)) of a parameter's flat state on every rank of this
// process that holds them. A state of 16 bits (a frozen parameter in a 16-bit precision) is rounded
// to nearest even. A state of 8 bits must be written in complete blocks. Writing values that Read
// returned restores the same bytes.
func (s *States) Write(param int, name string, start int64, v []float32) error {
	write := func(e Extent) error {
		if e.DType == graph.U8 {
			return s.quantize(name, start, e, v)
		}
		if as := halves[e.DType]; as != vec.NoHalf {
			low := make([]uint16, e.To-e.From)
			vec.NarrowRow(as, low, v[e.From:e.To])
			return s.writeTo(e.Holders, e.Buf, e.Off, halfBytes(low))
		}
		return s.writeTo(e.Holders, e.Buf, e.Off, Float32Bytes(v[e.From:e.To]))
	}
	if err := s.Extents(param, name, start, int64(len(v)), write); err != nil {
		return err
	}
	return s.copies(param, name, start, int64(len(v)), write)
}

var halves = map[graph.DType]vec.Half{graph.BF16: vec.BF16, graph.F16: vec.F16}

func halfBytes(v []uint16) []byte {
	if len(v) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&v[0])), 2*len(v))
}

func (s *States) writeTo(holders []int, buf graph.BufID, off int64, data []byte) error {
	for _, r := range holders {
		h, ok := s.local[r]
		if !ok {
			continue
		}
		if err := h.Write(buf, off, data); err != nil {
			return err
		}
	}
	return nil
}

// Read reads elements [start, start+len(v)) of a parameter's flat state. The error is ErrRemote if
// no rank of this process holds some of the elements.
func (s *States) Read(param int, name string, start int64, v []float32) error {
	return s.Extents(param, name, start, int64(len(v)), func(e Extent) error {
		h, err := s.reader(e.Holders)
		if err != nil {
			return err
		}
		if e.DType == graph.U8 {
			return s.dequantize(h, name, start, e, v)
		}
		if as := halves[e.DType]; as != vec.NoHalf {
			low := make([]uint16, e.To-e.From)
			if err := h.Read(e.Buf, e.Off, halfBytes(low)); err != nil {
				return err
			}
			vec.WidenRow(as, v[e.From:e.To], low)
			return nil
		}
		return h.Read(e.Buf, e.Off, Float32Bytes(v[e.From:e.To]))
	})
}

// perParam returns the buffer, byte offset and index of a parameter's element
// in a PerParam state, and the ranks that have it.
func (s *States) perParam(param int, name string) (graph.BufID, int64, []int, error) {
	w := s.where[param][0]
	st, err := s.find(w.unit, name)
	if err != nil {
		return graph.NoBuf, 0, nil, err
	}
	index, seen := int64(0), map[int]bool{}
	for _, seg := range s.p.Units[w.unit].Segments {
		if seg.Param == param {
			break
		}
		if !seen[seg.Param] {
			seen[seg.Param] = true
			index++
		}
	}
	return st.Buf, index * 4, s.ranks[place3{s.p.Units[w.unit].Stage, -1, -1, -1, -1}], nil
}

// WriteScalar sets a parameter's element of a PerParam state on every rank of this
// process.
func (s *States) WriteScalar(param int, name string, v float32) error {
	for _, q := range append([]int{param}, s.tied[param]...) {
		buf, off, holders, err := s.perParam(q, name)
		if err == nil {
			err = s.writeTo(holders, buf, off, Float32Bytes([]float32{v}))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// ChunkElems is the number of elements that are transferred at a time: the staging buffer's size.
const ChunkElems = checkpoint.ChunkElems

// NewChunk returns a staging buffer for a program's parameters, with ChunkElems elements, or with
// the size of the largest parameter if that is smaller.
func NewChunk(p *graph.Program) []float32 { return make([]float32, ChunkBytes(p)/4) }

// ChunkBytes returns the size of NewChunk's buffer.
func ChunkBytes(p *graph.Program) (bytes int64) {
	var most int64
	for i := range p.Tensors() {
		most = max(most, p.Params[i].Elems())
	}
	return 4 * min(ChunkElems, most)
}

// Stream reads a complete flat state of a parameter in chunks.
func (s *States) Stream(param int, name string, chunk []float32, sink func(start int64, v []float32) error) error {
	n := s.p.Params[param].Elems()
	for at := int64(0); at < n; {
		v := chunk[:min(int64(len(chunk)), n-at)]
		if err := s.Read(param, name, at, v); err != nil {
			return err
		}
		if err := sink(at, v); err != nil {
			return err
		}
		at += int64(len(v))
	}
	return nil
}

// ByName returns the parameters' indices in the byte order of their names.
func (s *States) ByName() []int {
	order := make([]int, len(s.p.Tensors()))
	for i := range order {
		order[i] = i
	}
	sort.Slice(order, func(i, j int) bool { return s.p.Params[order[i]].Name < s.p.Params[order[j]].Name })
	return order
}

// Hash writes all parameters, fp32 little-endian, in name order to h.
func (s *States) Hash(h hash.Hash) error {
	chunk := NewChunk(s.p)
	for _, i := range s.ByName() {
		err := s.Stream(i, "value", chunk, func(_ int64, v []float32) error {
			_, err := h.Write(Float32Bytes(v))
			return err
		})
		if err != nil {
			return fmt.Errorf("hash of parameter %q: %w", s.p.Params[i].Name, err)
		}
	}
	return nil
}

// Saved returns a state's name in checkpoints. The state of the parameters is named "model" there.
func Saved(state string) string {
	if state == valueState {
		return checkpoint.ModelState
	}
	return state
}

const valueState = "value"

// loaded is the inverse of Saved.
func loaded(state string) string {
	if state == checkpoint.ModelState {
		return valueState
	}
	return state
}

// scalesOf returns the buffer with the scales of a state in 8 bits.
func (s *States) scalesOf(values graph.BufID) (graph.BufID, error) {
	scales, ok := s.scales[values]
	if !ok {
		return graph.NoBuf, fmt.Errorf("states: the program has no scales of %s, which is in 8 bits", s.p.Buf(values).Name)
	}
	return scales, nil
}

// quantize writes an extent of a state in 8 bits, which must begin at a block. start is the index
// in the parameter from which e counts its elements.
func (s *States) quantize(name string, start int64, e Extent, v []float32) error {
	m, err := mapOf(name)
	if err != nil {
		return err
	}
	if (start+e.From)%graph.QuantBlock != 0 {
		return fmt.Errorf("states: element %d of %q is not the first of a block; 8-bit states are written by blocks of %d", start+e.From, name, graph.QuantBlock)
	}
	to, err := s.scalesOf(e.Buf)
	if err != nil {
		return err
	}
	x := v[e.From:e.To]
	codes, scales := make([]byte, len(x)), make([]float32, vec.Q8Blocks(len(x)))
	for lo := 0; lo < len(x); lo += graph.QuantBlock {
		hi := min(lo+graph.QuantBlock, len(x))
		scales[lo/graph.QuantBlock] = m.Quantize(codes[lo:hi], x[lo:hi])
	}
	if err := s.writeTo(e.Holders, e.Buf, e.Off, codes); err != nil {
		return err
	}
	return s.writeTo(e.Holders, to, scaleOffset(e.Off), Float32Bytes(scales))
}

// dequantize reads an extent of a state in 8 bits.
func (s *States) dequantize(h Holder, name string, start int64, e Extent, v []float32) error {
	m, err := mapOf(name)
	if err != nil {
		return err
	}
	from, err := s.scalesOf(e.Buf)
	if err != nil {
		return err
	}
	skip := (start + e.From) % graph.QuantBlock // elements of the first block before the extent
	codes := make([]byte, e.To-e.From)
	scales := make([]float32, vec.Q8Blocks(int(skip)+len(codes)))
	if err := h.Read(e.Buf, e.Off, codes); err != nil {
		return err
	}
	if err := h.Read(from, scaleOffset(e.Off), Float32Bytes(scales)); err != nil {
		return err
	}
	x := v[e.From:e.To]
	for lo, block := 0, 0; lo < len(x); block++ {
		hi := min((block+1)*graph.QuantBlock-int(skip), len(x))
		m.Dequantize(x[lo:hi], codes[lo:hi], scales[block])
		lo = hi
	}
	return nil
}
