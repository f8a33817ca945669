package graph

import (
	"fmt"
	"strconv"
)

// touch is a use of bytes of a root buffer by a step.
type touch struct {
	step   int32
	stream StreamID
	write  bool
	buf    BufID
	at     Region
}

// rootUse describes the uses of one root buffer so far in a walk over a section.
type rootUse struct {
	// touches are the uses that a later use may conflict with. A new use replaces an old one if
	// every operation ordered after the new one is also ordered after the old one.
	touches []touch
	written *byteSet // LifePhase and LifeStep buffers: the bytes that hold contents
	last    int32    // the last step that wrote, −1 none
}

// rootUses records the root buffers that a section uses. The role of a pipeline stage uses few of
// the program's buffers.
type rootUses struct {
	at   []int32 // by buffer: 1 + its index in list; 0: not used yet
	list []rootUse
}

// of returns the record of a root buffer. The pointer is valid until the next call.
func (u *rootUses) of(root BufID) *rootUse {
	if u.at[root] == 0 {
		u.list = append(u.list, rootUse{last: -1})
		u.at[root] = int32(len(u.list))
	}
	return &u.list[u.at[root]-1]
}

// writers finds the buffers that the host fills, and the LifeRun buffers that operations write.
func (v *verifier) writers() {
	p := v.p
	v.filled = make([]bool, len(p.Buffers))
	written := make([]bool, len(p.Buffers))
	fresh := make([]bool, len(p.Buffers))
	v.each(func(op *Op) error {
		Effects(op, func(e Effect) {
			root := v.regions.Of[e.Buf].Root
			written[root] = written[root] || e.Write
			fresh[root] = fresh[root] || e.Fresh
		})
		return nil
	})
	host := func(id BufID) {
		if id != NoBuf {
			v.filled[v.regions.Of[id].Root] = true
		}
	}
	for _, id := range p.HostBuffers() {
		host(id)
	}
	for i := range p.Params {
		if id := p.Params[i].Value; id != NoBuf && p.Buf(v.regions.Of[id].Root).Life == LifeRun {
			host(id)
		}
	}
	// Between rewrites inputs are not copied in yet, nor is the loss zeroed.
	input := func(id BufID) {
		if id != NoBuf && !fresh[v.regions.Of[id].Root] {
			host(id)
		}
	}
	for _, id := range []BufID{p.Tokens, p.Targets, p.Positions, p.Hyper, p.Key, p.Loss} {
		input(id)
	}
	for id := range p.Buffers {
		b := &p.Buffers[id]
		if b.View == nil && b.Class == Inputs {
			input(BufID(id))
		}
		if b.View == nil && b.Life == LifeRun && written[id] {
			v.filled[id] = true
		}
	}
}

func (v *verifier) sections() error {
	roots := rootUses{at: make([]int32, len(v.p.Buffers))}
	for i := range v.p.Sections {
		t, err := NewTrace(v.p, v.regions, &v.p.Sections[i])
		if err != nil {
			return err
		}
		if len(t.unrecorded) > 0 {
			w := t.unrecorded[0]
			return fmt.Errorf("%s: waits for event %d, which no operation of the section records before it", t.Label(w.step), w.event)
		}
		clear(roots.at)
		roots.list = nil
		for i := range t.Steps {
			if err := v.step(t, &roots, i); err != nil {
				return err
			}
		}
	}
	return nil
}

func (v *verifier) step(t *Trace, roots *rootUses, i int) error {
	op := t.Op(i)
	var err error
	Effects(op, func(e Effect) {
		if err == nil && e.Read {
			err = v.contents(t, roots.of(v.regions.Of[e.Buf].Root), i, e)
		}
	})
	Effects(op, func(e Effect) {
		if err == nil {
			err = v.ordered(t, roots.of(v.regions.Of[e.Buf].Root), i, e)
		}
	})
	if err != nil {
		return err
	}
	Effects(op, func(e Effect) {
		g := v.regions.Of[e.Buf]
		r := roots.of(g.Root)
		r.add(v.regions, touch{int32(i), op.Stream, e.Write, e.Buf, g})
		if e.Write && v.p.Buf(g.Root).Life != LifeRun {
			if r.written == nil {
				r.written = newByteSet(v.regions)
			}
			if r.stale(t, v.p.Buf(g.Root), i) {
				r.written.clear()
			}
			r.written.add(g)
			r.last = int32(i)
		}
	})
	return nil
}

// stale says that the contents are gone at step i: they were written in another run of a phase, to
// a buffer that lives for one run.
func (r *rootUse) stale(t *Trace, b *Buffer, i int) bool {
	return b.Life == LifePhase && r.last >= 0 && !t.sameOccurrence(int(r.last), i)
}

// contents checks that the bytes that step i reads have been written.
func (v *verifier) contents(t *Trace, r *rootUse, i int, e Effect) error {
	p, g := v.p, v.regions.Of[e.Buf]
	root := p.Buf(g.Root)
	if v.filled[g.Root] {
		return nil
	}
	switch {
	case root.Life == LifeRun:
		return fmt.Errorf("%s: reads %s, which no operation writes and the host does not fill", t.Label(i), v.quote(e.Buf))
	case r.last < 0:
		return fmt.Errorf("%s: reads %s, which no operation of the section writes before it", t.Label(i), v.quote(e.Buf))
	case r.stale(t, root, i):
		return fmt.Errorf("%s: reads %s, which lives for a phase and was last written in %s", t.Label(i), v.quote(e.Buf), t.Label(int(r.last)))
	}
	if missing := r.written.missing(g); missing > root.Pad {
		return fmt.Errorf("%s: reads %s, of which %d bytes were not written before it, want at most the %d of padding; the last write is %s",
			t.Label(i), v.quote(e.Buf), missing, root.Pad, t.Label(int(r.last)))
	}
	return nil
}

// ordered checks that step i comes after every earlier use with which it conflicts.
func (v *verifier) ordered(t *Trace, r *rootUse, i int, e Effect) error {
	g := v.regions.Of[e.Buf]
	for k := range r.touches {
		old := &r.touches[k]
		if !(old.write || e.Write) || int(old.step) == i || t.Before(int(old.step), i) || !v.regions.overlap(old.at, g) {
			continue
		}
		what := "it"
		if old.buf != e.Buf {
			what = strconv.Quote(v.p.bufName(old.buf))
		}
		again := ""
		if a, b := t.Steps[old.step], t.Steps[i]; a.Phase == b.Phase && a.Copy != b.Copy {
			again = " in the repetition before"
		}
		return fmt.Errorf("%s: %s %s on stream %v, and %s %s %s on stream %v%s with no event that orders the two",
			t.Label(i), verb(e.Write), v.quote(e.Buf), t.Op(i).Stream, t.Label(int(old.step)), verb(old.write), what, t.Op(int(old.step)).Stream, again)
	}
	return nil
}

func verb(write bool) string {
	if write {
		return "writes"
	}
	return "reads"
}

func (r *rootUse) add(regions *Regions, n touch) {
	keep := r.touches[:0]
	for _, old := range r.touches {
		after := n.write || old.stream == n.stream && !old.write
		if !(after && regions.covers(n.at, old.at)) {
			keep = append(keep, old)
		}
	}
	r.touches = append(keep, n)
}
