package graph

import "fmt"

// operations checks each operation separately.
func (v *verifier) operations() error {
	p := v.p
	var c checker // one for all: a deep model has many operations
	own := map[Kind]*Operation{}
	return v.each(func(op *Op) error {
		if err := p.checkRefs(op); err != nil {
			return err
		}
		info, ok := op.Info()
		if !ok {
			return Check(p, op)
		}
		if err := checkOwn(op, own); err != nil {
			return err
		}
		if err := info.check1(&c, p, op); err != nil {
			return err
		}
		if op.Pass > Update {
			return fmt.Errorf("%v is not a pass", op.Pass)
		}
		if op.Skip != NoBuf {
			if s := p.Buf(op.Skip); s.DType != I32 || s.Elems() != 1 {
				return fmt.Errorf("skip flag %s is %v %v, want one i32", p.bufName(op.Skip), s.DType, s.Shape)
			}
		}
		var first BufID = NoBuf
		var err error
		Effects(op, func(e Effect) {
			space := p.Buf(e.Buf).Space
			switch {
			case err != nil || op.Kind == Copy && e.Buf != op.Skip:
			case space == Disk:
				err = fmt.Errorf("%s is on %v, which only copies reach", p.bufName(e.Buf), space)
			case first == NoBuf:
				first = e.Buf
			case space != p.Buf(first).Space:
				err = fmt.Errorf("%s is in %v memory and %s in %v, want one memory space", p.bufName(first), p.Buf(first).Space, p.bufName(e.Buf), space)
			}
		})
		if err == nil && op.Work != NoBuf {
			err = v.workspaceApart(op)
		}
		return err
	})
}

func (v *verifier) workspaceApart(op *Op) error {
	work := v.regions.Of[op.Work]
	var err error
	Effects(op, func(e Effect) {
		if err == nil && !(e.Fresh && e.Buf == op.Work) && v.regions.overlap(work, v.regions.Of[e.Buf]) {
			err = fmt.Errorf("its workspace %s overlaps its operand %s", v.p.bufName(op.Work), v.p.bufName(e.Buf))
		}
	})
	return err
}

// micros checks that an operation touches only buffers of its own micro-batch and shared buffers.
func (v *verifier) micros() error {
	p := v.p
	of := make([]int, len(p.Buffers)) // −1: shared
	several := false
	for id := range p.Buffers {
		if micro, ok := p.microOfRoot(v.regions.Of[id].Root); ok {
			of[id] = micro
			several = several || micro > 0
		} else {
			of[id] = -1
		}
	}
	return v.each(func(op *Op) error {
		if op.Micro < 0 {
			return fmt.Errorf("belongs to micro-batch %d, want 0 or more", op.Micro)
		}
		if !several && op.Micro == 0 {
			return nil
		}
		var err error
		Effects(op, func(e Effect) {
			if at := of[e.Buf]; err == nil && at >= 0 && at != op.Micro {
				err = fmt.Errorf("is of micro-batch %d and touches %s of micro-batch %d", op.Micro, p.bufName(e.Buf), at)
			}
		})
		return err
	})
}

// collectives checks that all collectives of a group are on one stream.
func (v *verifier) collectives() error {
	stream := map[int]StreamID{}
	name := map[int]string{}
	return v.each(func(op *Op) error {
		var axis int
		switch a := op.Attr.(type) {
		case GroupAttr:
			axis = a.Axis
		case PeerAttr:
			axis = a.Axis
		default:
			return nil
		}
		if s, ok := stream[axis]; ok && s != op.Stream {
			return fmt.Errorf("is a collective on stream %v, and %s of the same group (mesh axis %d) on stream %v; "+
				"ranks could meet them in different orders", op.Stream, name[axis], axis, s)
		}
		stream[axis], name[axis] = op.Stream, op.Name
		return nil
	})
}
