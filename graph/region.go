package graph

import (
	"fmt"
	"math"
	"slices"
	"sort"
)

// Region is the range of bytes that a buffer occupies in its root buffer. On the rank with index
// i[a] along each mesh axis a it is [Lo + Σ stride[a]·i[a], Hi + Σ stride[a]·i[a]). Frame
// identifies the strides; frame 0 has none, so its bytes are the same on every rank.
type Region struct {
	Root   BufID
	Lo, Hi int64
	Frame  int
}

// Regions gives the region of every buffer of a program.
type Regions struct {
	Of     []Region // by BufID
	spread []int64  // by frame: offset of the last rank's bytes minus that of the first rank's
}

// NewRegions resolves all views. It fails if a view has no root, extends beyond its base on some
// rank, or is in another memory space than its base.
func NewRegions(p *Program) (*Regions, error) {
	r := &Regions{Of: make([]Region, len(p.Buffers)), spread: []int64{0}}
	frames := map[string]int{"": 0}
	for id := range p.Buffers {
		if err := p.checkSize(BufID(id)); err != nil {
			return nil, err
		}
	}
	strides := make([]int64, len(p.Mesh))
	for id := range p.Buffers {
		clear(strides)
		lo, at, strided := int64(0), BufID(id), false
		for depth := 0; p.Buffers[at].View != nil; depth++ {
			v := p.Buffers[at].View
			if depth > len(p.Buffers) {
				return nil, fmt.Errorf("buffer %s: its views form a circle; a view must end in a buffer that is none", p.bufName(BufID(id)))
			}
			if err := p.checkView(at); err != nil {
				return nil, err
			}
			lo += v.Offset
			if v.RankStride != 0 && p.Mesh[v.Axis].Size > 1 {
				strides[v.Axis] += v.RankStride
				strided = true
			}
			at = v.Base
		}
		reg := Region{Root: at, Lo: lo, Hi: lo + p.Buffers[id].Bytes()}
		if strided {
			key := fmt.Sprint(strides)
			f, ok := frames[key]
			if !ok {
				f = len(r.spread)
				frames[key] = f
				spread := int64(0)
				for a, s := range strides {
					spread += s * int64(p.Mesh[a].Size-1)
				}
				r.spread = append(r.spread, spread)
			}
			reg.Frame = f
		}
		r.Of[id] = reg
	}
	return r, nil
}

// overlap says whether two regions of one root share a byte on some rank.
func (r *Regions) overlap(a, b Region) bool {
	if a.Root != b.Root {
		return false
	}
	if a.Frame == b.Frame {
		return a.Lo < b.Hi && b.Lo < a.Hi
	}
	return a.Lo < b.Hi+r.spread[b.Frame] && b.Lo < a.Hi+r.spread[a.Frame]
}

// covers says whether a has all bytes of b on every rank.
func (r *Regions) covers(a, b Region) bool {
	if a.Frame == b.Frame {
		return a.Lo <= b.Lo && b.Hi <= a.Hi
	}
	return a.Frame == 0 && a.Lo <= b.Lo && b.Hi+r.spread[b.Frame] <= a.Hi
}

// checkSize rejects unknown types and shapes whose size in bytes does not fit an int64.
func (p *Program) checkSize(id BufID) error {
	b := &p.Buffers[id]
	switch {
	case int(b.DType) >= len(dtypeSizes):
		return fmt.Errorf("buffer %s: %v is not a dtype", p.bufName(id), b.DType)
	case b.Space >= NumSpaces:
		return fmt.Errorf("buffer %s: %v is not a memory space", p.bufName(id), b.Space)
	case b.Class >= NumClasses:
		return fmt.Errorf("buffer %s: %v is not a class", p.bufName(id), b.Class)
	case b.Life > LifeRun:
		return fmt.Errorf("buffer %s: %v is not a lifetime", p.bufName(id), b.Life)
	}
	n := b.DType.Size()
	for _, d := range b.Shape {
		if d < 1 {
			return fmt.Errorf("buffer %s: shape %v has a dimension below 1", p.bufName(id), b.Shape)
		}
		if n > math.MaxInt64/4/d {
			return fmt.Errorf("buffer %s: shape %v of %v has more bytes than an int64 counts", p.bufName(id), b.Shape, b.DType)
		}
		n *= d
	}
	if b.Pad < 0 || b.Pad > n {
		return fmt.Errorf("buffer %s: %d bytes of padding, want 0 to its %d bytes", p.bufName(id), b.Pad, n)
	}
	return nil
}

func (p *Program) checkView(id BufID) error {
	b := &p.Buffers[id]
	v := b.View
	if v.Base < 0 || int(v.Base) >= len(p.Buffers) || v.Base == id {
		return fmt.Errorf("buffer %s: views buffer %d, want another of the program's %d", p.bufName(id), v.Base, len(p.Buffers))
	}
	base := &p.Buffers[v.Base]
	size := int64(1)
	if v.RankStride != 0 {
		if v.Axis < 0 || v.Axis >= len(p.Mesh) {
			return fmt.Errorf("buffer %s: its rank stride is along mesh axis %d, want 0 to %d", p.bufName(id), v.Axis, len(p.Mesh)-1)
		}
		size = int64(p.Mesh[v.Axis].Size)
	}
	switch {
	case base.Space != b.Space:
		return fmt.Errorf("buffer %s: is in %v, its base %s in %v; a view is in its base's space", p.bufName(id), b.Space, p.bufName(v.Base), base.Space)
	case v.Offset < 0 || v.RankStride < 0:
		return fmt.Errorf("buffer %s: offset %d and rank stride %d must not be negative", p.bufName(id), v.Offset, v.RankStride)
	case v.Offset > base.Bytes() || v.RankStride > 0 && size > 1 && v.RankStride > base.Bytes()/(size-1) ||
		v.Offset+v.RankStride*(size-1)+b.Bytes() > base.Bytes():
		return fmt.Errorf("buffer %s: bytes %d to %d on the last of %d ranks, want inside the %d bytes of %s",
			p.bufName(id), v.Offset+v.RankStride*(size-1), v.Offset+v.RankStride*(size-1)+b.Bytes(), size, base.Bytes(), p.bufName(v.Base))
	}
	return nil
}

// byteSet is a set of bytes of one root buffer. For each frame it has a sorted list of spans that
// neither overlap nor touch.
type byteSet struct {
	regions *Regions
	frames  []frameSpans
}

type frameSpans struct {
	frame int
	spans []span
}

type span struct{ lo, hi int64 }

func newByteSet(r *Regions) *byteSet { return &byteSet{regions: r} }

func (s *byteSet) clear() {
	for i := range s.frames {
		s.frames[i].spans = s.frames[i].spans[:0]
	}
}

func (s *byteSet) empty() bool {
	for i := range s.frames {
		if len(s.frames[i].spans) > 0 {
			return false
		}
	}
	return true
}

func (s *byteSet) of(frame int) *frameSpans {
	for i := range s.frames {
		if s.frames[i].frame == frame {
			return &s.frames[i]
		}
	}
	s.frames = append(s.frames, frameSpans{frame: frame})
	return &s.frames[len(s.frames)-1]
}

// add adds the bytes of g to the set.
func (s *byteSet) add(g Region) {
	f := s.of(g.Frame)
	f.spans = addSpan(f.spans, span{g.Lo, g.Hi})
}

// remove removes the bytes of g from the set. Spans of another frame are removed only if g has
// frame 0 and covers them on every rank.
func (s *byteSet) remove(g Region) {
	f := s.of(g.Frame)
	f.spans = removeSpan(f.spans, span{g.Lo, g.Hi})
	if g.Frame != 0 {
		return
	}
	for i := range s.frames {
		f := &s.frames[i]
		if f.frame == 0 {
			continue
		}
		spread := s.regions.spread[f.frame]
		f.spans = slices.DeleteFunc(f.spans, func(x span) bool { return g.Lo <= x.lo && x.hi+spread <= g.Hi })
	}
}

// missing returns how many bytes of g are not in the set on some rank.
func (s *byteSet) missing(g Region) int64 {
	rest := []span{{g.Lo, g.Hi}}
	for _, x := range s.of(g.Frame).spans {
		rest = removeSpan(rest, x)
	}
	n := int64(0)
	plain := s.of(0).spans
	for _, x := range rest {
		if g.Frame != 0 && covered(plain, span{x.lo, x.hi + s.regions.spread[g.Frame]}) {
			continue
		}
		n += x.hi - x.lo
	}
	return n
}

func covered(list []span, x span) bool {
	i := sort.Search(len(list), func(i int) bool { return list[i].hi > x.lo })
	return i < len(list) && list[i].lo <= x.lo && x.hi <= list[i].hi
}

func addSpan(list []span, x span) []span {
	i := sort.Search(len(list), func(i int) bool { return list[i].hi >= x.lo })
	j := i
	for j < len(list) && list[j].lo <= x.hi {
		x.lo, x.hi = min(x.lo, list[j].lo), max(x.hi, list[j].hi)
		j++
	}
	return slices.Replace(list, i, j, x)
}

func removeSpan(list []span, x span) []span {
	i := sort.Search(len(list), func(i int) bool { return list[i].hi > x.lo })
	j := i
	var keep [2]span
	k := keep[:0]
	for j < len(list) && list[j].lo < x.hi {
		if list[j].lo < x.lo {
			k = append(k, span{list[j].lo, x.lo})
		}
		if x.hi < list[j].hi {
			k = append(k, span{x.hi, list[j].hi})
		}
		j++
	}
	return slices.Replace(list, i, j, k...)
}
