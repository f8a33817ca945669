package spillway

import (
	"fmt"
	"hash"
	"sort"
	"unsafe"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/graph"
)

// states reads and writes resident states by parameter and element, whichever
// ranks hold them. Nothing above it knows about stages, shards or padding.
type states struct {
	p     *graph.Program
	ranks []stateRank
	along [][][]stateRank // by mesh axis and index along it: the ranks there
	where [][]place       // by parameter, in element order
}

// stateRank moves bytes between the host and one rank's buffers.
type stateRank interface {
	Write(buf graph.BufID, off int64, data []byte) error
	Read(buf graph.BufID, off int64, data []byte) error
}

// place is a segment of a parameter in its unit.
type place struct {
	unit int
	seg  graph.Segment
}

func newStates(p *graph.Program, ranks []stateRank) *states {
	s := &states{p: p, ranks: ranks, where: make([][]place, len(p.Params))}
	for axis, a := range p.Mesh {
		s.along = append(s.along, make([][]stateRank, a.Size))
		for i, r := range ranks {
			k := comm.Coord(p.Mesh, i)[axis]
			s.along[axis][k] = append(s.along[axis][k], r)
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

func float32Bytes(v []float32) []byte {
	if len(v) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&v[0])), 4*len(v))
}

// stateNames lists the states of a parameter: "value" and its optimizer's.
func (s *states) stateNames(param int) []graph.State {
	w := s.where[param]
	if len(w) == 0 {
		return nil
	}
	u := &s.p.Units[w[0].unit]
	return append([]graph.State{u.Value}, u.States...)
}

// each calls visit for every run of elements [start, start+n) of a parameter's
// state that lies in one buffer at byte off; holders are the ranks that have it.
func (s *states) each(param int, name string, start, n int64, visit func(buf graph.BufID, off, from, to int64, holders []stateRank) error) error {
	for _, w := range s.where[param] {
		lo, hi := max(start, w.seg.Start), min(start+n, w.seg.Start+w.seg.Len)
		if lo >= hi {
			continue
		}
		st, err := s.find(w.unit, name)
		if err != nil {
			return err
		}
		for lo < hi {
			flat := w.seg.Flat + lo - w.seg.Start
			end, holders := hi, s.ranks
			off := flat
			if st.Axis >= 0 {
				shard := flat / st.Len
				end = min(hi, lo+(shard+1)*st.Len-flat)
				holders = s.along[st.Axis][shard]
				off = flat - shard*st.Len
			}
			if err := visit(st.Buf, off*4, lo-start, end-start, holders); err != nil {
				return err
			}
			lo = end
		}
	}
	return nil
}

func (s *states) find(unit int, name string) (graph.State, error) {
	u := &s.p.Units[unit]
	for _, st := range append([]graph.State{u.Value}, u.States...) {
		if st.Name == name {
			return st, nil
		}
	}
	return graph.State{}, fmt.Errorf("states: unit %q has no state %q", u.Name, name)
}

// write sets elements [start, start+len(v)) of a parameter's flat state on
// every rank that holds them.
func (s *states) write(param int, name string, start int64, v []float32) error {
	return s.each(param, name, start, int64(len(v)), func(buf graph.BufID, off, from, to int64, holders []stateRank) error {
		for _, r := range holders {
			if err := r.Write(buf, off, float32Bytes(v[from:to])); err != nil {
				return err
			}
		}
		return nil
	})
}

// read gets elements [start, start+len(v)) of a parameter's flat state.
func (s *states) read(param int, name string, start int64, v []float32) error {
	return s.each(param, name, start, int64(len(v)), func(buf graph.BufID, off, from, to int64, holders []stateRank) error {
		return holders[0].Read(buf, off, float32Bytes(v[from:to]))
	})
}

// holder returns the first rank that holds an element of a parameter's flat state.
func (s *states) holder(param int, name string, elem int64) (rank int, err error) {
	err = s.each(param, name, elem, 1, func(_ graph.BufID, _, _, _ int64, holders []stateRank) error {
		for i, r := range s.ranks {
			if r == holders[0] {
				rank = i
			}
		}
		return nil
	})
	return rank, err
}

// perParam returns the buffer, byte offset and index of a parameter's element
// in a PerParam state.
func (s *states) perParam(param int, name string) (graph.BufID, int64, error) {
	w := s.where[param][0]
	st, err := s.find(w.unit, name)
	if err != nil {
		return graph.NoBuf, 0, err
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
	return st.Buf, index * 4, nil
}

func (s *states) writeScalar(param int, name string, v float32) error {
	buf, off, err := s.perParam(param, name)
	if err != nil {
		return err
	}
	for _, r := range s.ranks {
		if err := r.Write(buf, off, float32Bytes([]float32{v})); err != nil {
			return err
		}
	}
	return nil
}

func (s *states) readScalar(param int, name string) (float32, error) {
	buf, off, err := s.perParam(param, name)
	if err != nil {
		return 0, err
	}
	v := make([]float32, 1)
	err = s.ranks[0].Read(buf, off, float32Bytes(v))
	return v[0], err
}

// chunkElems is how many elements move at a time: the staging buffer's size.
const chunkElems = 1 << 18

// stream reads a whole flat state of a parameter in chunks.
func (s *states) stream(param int, name string, chunk []float32, sink func(start int64, v []float32) error) error {
	n := s.p.Params[param].Elems()
	for at := int64(0); at < n; {
		v := chunk[:min(int64(len(chunk)), n-at)]
		if err := s.read(param, name, at, v); err != nil {
			return err
		}
		if err := sink(at, v); err != nil {
			return err
		}
		at += int64(len(v))
	}
	return nil
}

// byName returns the parameters' indices in the byte order of their names.
func (s *states) byName() []int {
	order := make([]int, len(s.p.Params))
	for i := range order {
		order[i] = i
	}
	sort.Slice(order, func(i, j int) bool { return s.p.Params[order[i]].Name < s.p.Params[order[j]].Name })
	return order
}

// hash feeds all parameters, fp32 little-endian, in name order into h.
func (s *states) hash(h hash.Hash) error {
	chunk := make([]float32, chunkElems)
	for _, i := range s.byName() {
		err := s.stream(i, "value", chunk, func(_ int64, v []float32) error {
			_, err := h.Write(float32Bytes(v))
			return err
		})
		if err != nil {
			return fmt.Errorf("hash of parameter %q: %w", s.p.Params[i].Name, err)
		}
	}
	return nil
}
