package peers

import (
	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// port receives the addends of a rank's sums from other GPUs. It has a side stream for the
// copies and device memory for two pieces of a sum. While one piece is added the next one is
// copied:
//
//	side  wait begun │ copies → 0 │ filled 0 │ copies → 1 │ filled 1 │ wait freed 0 │ copies → 0 …
//	rank  begun │        wait filled 0 │ sum 0 │ freed 0 │ wait filled 1 │ sum 1 │ freed 1 …
//
// Every wait is for an event recorded before it, as in a member's operation. The waits also
// order the next operation, on whichever of the rank's streams it runs.
type port struct {
	side  driver.Stream
	begun driver.Event
	slots [2]slot
	half  int64 // bytes of a slot
	next  int   // index of the slot to fill next
}

// slot holds one piece of every source on another GPU, one after the other.
type slot struct {
	at            driver.Address
	filled, freed driver.Event
}

// pieceAlign is the granularity of a piece in bytes.
const pieceAlign = 256

func newPort(ctx *cuda.Context, bytes int64) (*port, error) {
	p := &port{half: bytes / 2 / pieceAlign * pieceAlign}
	at, err := ctx.Scratch(bytes)
	if err != nil {
		return nil, err
	}
	if p.side, err = ctx.SideStream(); err != nil {
		return nil, err
	}
	for i := range p.slots {
		p.slots[i].at = at + driver.Address(int64(i)*p.half)
	}
	for _, e := range []*driver.Event{&p.begun, &p.slots[0].filled, &p.slots[0].freed, &p.slots[1].filled, &p.slots[1].freed} {
		if *e, err = ctx.DriverEvent(); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// settle makes s wait for the work on the side stream.
func (p *port) settle(api driver.API, s driver.Stream) {
	if p != nil && api.Record(p.begun, p.side) == nil {
		_ = api.Wait(s, p.begun)
	}
}

// each returns the number of elements of each source that fit in a slot for the given number of
// sources, 0 if none.
func (p *port) each(sources int, size int64) int64 {
	if p == nil {
		return 0
	}
	return p.half / int64(sources) / pieceAlign * pieceAlign / size
}

// sumInPieces is sumOf for sources, and destinations if there are several, on other GPUs.
// It adds the same elements in the same order as sumOf and gives the same bits.
func (k *kernel) sumInPieces(api driver.API, s driver.Stream, dsts []driver.Address, read, written int64, accumulate bool) error {
	p, size := k.m.port, k.Sig.DType.Size()
	n := read / size
	wide := written / n // bytes of an element of the result
	each := p.each(k.m.beyond, size)
	if err := api.Record(p.begun, s); err != nil {
		return err
	}
	if err := api.Wait(p.side, p.begun); err != nil {
		return err
	}
	for at := int64(0); at < n; at += each {
		piece := min(each, n-at)
		at := driver.Address(at)
		free, err := k.takeIn(api, s, at*driver.Address(size), each*size, piece*size)
		if err != nil {
			return err
		}
		near := k.pieceDsts[:0]
		for i, d := range dsts {
			if len(dsts) == 1 || !k.m.far[i] {
				near = append(near, d+at*driver.Address(wide))
			}
		}
		srcs := comm.Addends(&k.Call, k.pieceSrcs)
		k.tell(api, s, near, srcs, piece*size, piece*wide)
		if err := k.sum.Enqueue(api, s, near, srcs, piece, accumulate); err != nil {
			return err
		}
		if err := api.Record(free, s); err != nil {
			return err
		}
		if err := k.handOut(api, s, dsts, at*driver.Address(wide), piece*wide); err != nil {
			return err
		}
	}
	return nil
}

// takeIn copies n bytes at offset off of each source on another GPU into the next slot,
// apart bytes from one source to the next, and makes s wait for the copies. It sets pieceSrcs
// and returns the event to record once the slot may be overwritten.
func (k *kernel) takeIn(api driver.API, s driver.Stream, off driver.Address, apart, n int64) (free driver.Event, err error) {
	p := k.m.port
	in := &p.slots[p.next]
	p.next = 1 - p.next
	if err := api.Wait(p.side, in.freed); err != nil {
		return 0, err
	}
	self, w := k.m.Rank(), k.m.Size()
	to := in.at
	for j := range w {
		i := (self + j) % w // ranks start at different peers
		k.pieceSrcs[i] = k.srcs[i] + off
		if !k.m.far[i] {
			continue
		}
		if err := k.m.fetch(api, p.side, to, i, k.pieceSrcs[i], n); err != nil {
			return 0, err
		}
		k.pieceSrcs[i] = to
		to += driver.Address(apart)
	}
	if err := api.Record(in.filled, p.side); err != nil {
		return 0, err
	}
	return in.freed, api.Wait(s, in.filled)
}

// handOut copies n bytes of the rank's result to the buffers of members on other GPUs, if
// the operation has several destinations.
func (k *kernel) handOut(api driver.API, s driver.Stream, dsts []driver.Address, off driver.Address, n int64) error {
	if len(dsts) == 1 {
		return nil
	}
	self, w := k.m.Rank(), k.m.Size()
	for j := range w {
		i := (self + j) % w
		if !k.m.far[i] {
			continue
		}
		if err := api.CopyPeer(dsts[i]+off, k.m.peer(i).ctx.Handle(), dsts[self]+off, k.m.ctx.Handle(), n, s); err != nil {
			return err
		}
	}
	return nil
}

// MostScratch is the largest device memory of a rank's port: two slots with pieces of 2 MiB
// from each of seven other ranks, which a link of 400 GB/s moves in 5 µs.
const MostScratch = 32 << 20

// ScratchBytes returns the device memory that each rank's port needs for the sums of a
// program, at most MostScratch: twice the bytes that the largest sum reads from other GPUs, 0
// if no sum does. gpu is the GPU of each rank.
func ScratchBytes(p *graph.Program, gpu []int) int64 {
	most := int64(0)
	for s := range p.Sections {
		for ph := range p.Sections[s].Phases {
			ops := p.Sections[s].Phases[ph].Ops
			for i := range ops {
				most = max(most, takesIn(p, &ops[i], gpu))
			}
		}
	}
	return min(2*most, MostScratch)
}

// takesIn returns the most bytes that a rank reads from other GPUs for an operation's sum.
func takesIn(p *graph.Program, op *graph.Op, gpu []int) (most int64) {
	if op.Kind != graph.ReduceScatter && op.Kind != graph.AllReduce {
		return 0
	}
	attr, ok := op.Attr.(graph.GroupAttr)
	if !ok {
		return 0
	}
	buf, longer := op.Out[0].Buf, int64(16) // shares start at multiples of 16 elements: see comm.Share
	if op.Kind == graph.ReduceScatter {
		buf, longer = op.In[0], 0
	}
	b := p.Buf(buf)
	for rank := range gpu {
		members := comm.Members(p.Mesh, rank, attr.Axis)
		far := int64(0)
		for _, m := range members {
			if gpu[m] != gpu[rank] {
				far++
			}
		}
		n, size := int64(len(members)), b.DType.Size()
		part := ((b.Bytes()/size+n-1)/n + longer) * size
		most = max(most, far*((part+pieceAlign-1)/pieceAlign*pieceAlign))
	}
	return most
}
