package kernels

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
)

// BlockElems is the alignment, in elements, of the starts of parameters, segments and
// shards: no 256-element block of a norm is split over two of them.
const BlockElems = 256

// Span is the part of one parameter segment that lies in a rank's shard of a unit.
type Span struct {
	Param  int // index among the unit's distinct parameters, in the order of its segments
	Lo, Hi int // elements [Lo, Hi) of the rank's buffer
	Decay  bool
	First  int64 // index within the parameter of the element at Lo
	ID     int   // index into Program.Params
}

// Spans returns the rank's spans of the trainable parameters of a unit. trainable says
// for each distinct parameter of the unit whether it is trainable.
func (b *Binding) Spans(a graph.ShardAttr) (spans []Span, trainable []bool, err error) {
	p := b.Program
	index := int64(0)
	if a.Axis >= 0 {
		if a.Axis >= len(b.Coord) {
			return nil, nil, fmt.Errorf("shard lies along mesh axis %d, the rank has %d coordinates", a.Axis, len(b.Coord))
		}
		index = int64(b.Coord[a.Axis])
	}
	from := a.From(index)
	if from%BlockElems != 0 {
		return nil, nil, fmt.Errorf("the shard starts at element %d of unit %s, want a multiple of %d", from, p.Units[a.Unit].Name, BlockElems)
	}
	elsewhere := a.Once > 0 && a.Once <= len(b.Coord) && b.Coord[a.Once-1] > 0
	number := map[int]int{}
	for i, s := range p.Units[a.Unit].Segments {
		if s.Param < 0 || s.Param >= len(p.Params) {
			return nil, nil, fmt.Errorf("segment %d of unit %s: the program has no parameter %d", i, p.Units[a.Unit].Name, s.Param)
		}
		param := &p.Params[s.Param]
		if s.Flat%BlockElems != 0 || s.Start%BlockElems != 0 || s.Flat < 0 || s.Start < 0 || s.Len < 0 {
			return nil, nil, fmt.Errorf("segment of %s in unit %s: starts at element %d of the parameter and %d of the unit, want multiples of %d",
				param.Name, p.Units[a.Unit].Name, s.Start, s.Flat, BlockElems)
		}
		j, ok := number[s.Param]
		if !ok {
			j = len(trainable)
			number[s.Param] = j
			trainable = append(trainable, !param.Frozen)
		}
		lo, hi := max(s.Flat, from), min(s.Flat+s.Len, from+a.Len)
		if lo < hi && !param.Frozen && !elsewhere {
			spans = append(spans, Span{Param: j, Lo: int(lo - from), Hi: int(hi - from), Decay: param.Decay, First: s.Start + lo - s.Flat, ID: s.Param})
		}
	}
	return spans, trainable, nil
}

// Adapted returns the spans for which a layer-wise update rule, such as LAMB, needs the
// parameter's norm; see graph.UpdateAttr.AdaptAll.
func Adapted(a graph.UpdateAttr, spans []Span) []Span {
	if a.AdaptAll {
		return spans
	}
	var some []Span
	for _, s := range spans {
		if s.Decay {
			some = append(some, s)
		}
	}
	return some
}

// WholeParams returns an error if the unit holds only part of a parameter: a norm over
// the unit's segments would not be the norm of that parameter.
func (b *Binding) WholeParams(unit int) error {
	p := b.Program
	held := map[int]int64{}
	for _, s := range p.Units[unit].Segments {
		held[s.Param] += s.Len
	}
	for i, n := range held {
		if i >= 0 && i < len(p.Params) && n != p.LocalElems(&p.Params[i]) {
			return fmt.Errorf("unit %s holds %d of the %d elements of %s; norms by parameter need all of them in one unit",
				p.Units[unit].Name, n, p.Params[i].Elems(), p.Params[i].Name)
		}
	}
	return nil
}
