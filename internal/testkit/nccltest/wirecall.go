//go:build linux

package nccltest

import (
	"errors"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/comm/nccl"
	"github.com/spillway-ml/spillway/device/cuda/driver"
)

type wireGroup struct {
	depth int
	calls []*wireCall
}

// wireCall is a rank's part of an operation.
type wireCall struct {
	c      *wired
	name   string
	at     driver.Address // what is sent, or comes
	out    driver.Address // of an all-gather
	bytes  int64
	peer   int // the root of a broadcast
	number int
	stream driver.Stream
}

func (w *Wire) GroupStart() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	tid := unix.Gettid()
	if w.open[tid] == nil {
		w.open[tid] = &wireGroup{}
	}
	w.open[tid].depth++
	return nil
}

func (w *Wire) GroupEnd() error {
	w.mu.Lock()
	tid := unix.Gettid()
	g := w.open[tid]
	if g == nil {
		defer w.mu.Unlock()
		return w.wrong("ncclGroupEnd", "without a start")
	}
	if g.depth--; g.depth > 0 {
		w.mu.Unlock()
		return nil
	}
	delete(w.open, tid)
	w.mu.Unlock()
	return w.begin(g.calls)
}

func (w *Wire) call(x *wireCall, c nccl.Comm) error {
	device := w.d.Current()
	w.mu.Lock()
	m, err := w.settled(x.name, c, device)
	if err == nil && (x.bytes <= 0 || x.peer < 0 || x.peer >= len(m.ranks)) {
		err = w.wrong(x.name, "rank %d of %d: %d bytes, peer %d", m.rank, len(m.ranks), x.bytes, x.peer)
	}
	if err != nil {
		w.mu.Unlock()
		return err
	}
	x.c = m
	if x.name == "ncclAllGather" || x.name == "ncclBroadcast" {
		m.count++
		x.number = m.count
	}
	if g := w.open[unix.Gettid()]; g != nil {
		g.calls = append(g.calls, x)
		w.mu.Unlock()
		return nil
	}
	w.mu.Unlock()
	return w.begin([]*wireCall{x})
}

// begin enqueues calls on their streams: first all sends, then all receives.
func (w *Wire) begin(calls []*wireCall) error {
	for _, x := range calls {
		reads, writes := x.touches()
		w.d.Access(x.name, x.stream, reads, writes)
	}
	for _, x := range calls {
		if err := w.d.Run(x.stream, x.name, x.sends(w)); err != nil {
			return err
		}
	}
	for _, x := range calls {
		from := x.from()
		arrived := func() bool {
			if x.c.dead.Load() {
				return true
			}
			for _, b := range from {
				if !x.c.link.has(b, 1) {
					return false
				}
			}
			return true
		}
		if err := errors.Join(w.d.Until(x.stream, x.name, arrived), w.d.Run(x.stream, x.name, func() error { return x.comes(w, from) })); err != nil {
			return err
		}
	}
	return nil
}

// touches returns the ranges of its own rank's memory that a call reads and writes.
func (x *wireCall) touches() (reads, writes []driver.Range) {
	own := []driver.Range{{At: x.at, Len: x.bytes}}
	switch {
	case x.name == "ncclSend", x.name == "ncclBroadcast" && x.c.rank == x.peer:
		return own, nil
	case x.name != "ncclAllGather":
		return nil, own
	}
	for i := range x.c.ranks {
		if to := x.out + driver.Address(int64(i)*x.bytes); to != x.at {
			writes = append(writes, driver.Range{At: to, Len: x.bytes})
		}
	}
	return own, writes
}

// sends returns a function that sends this rank's data to the others.
func (x *wireCall) sends(w *Wire) func() error {
	return func() error {
		to := x.c.ranks
		switch {
		case x.c.dead.Load(), x.name == "ncclRecv", x.name == "ncclBroadcast" && x.c.rank != x.peer:
			return nil
		case x.name == "ncclSend":
			to = to[x.peer : x.peer+1]
		}
		mem, err := w.d.Bytes(x.at, x.bytes)
		for _, r := range to {
			if err == nil && (r != x.c.link.self || x.name == "ncclSend") {
				_ = x.c.link.send(letter{To: r, Comm: x.c.id, Kind: x.name, Number: x.number, Bytes: mem}) // a hub that is gone: nothing comes back either
			}
		}
		return err
	}
}

// from returns the boxes from which a call takes letters.
func (x *wireCall) from() (list []box) {
	c := x.c
	switch {
	case x.name == "ncclRecv":
		return []box{{c.id, c.ranks[x.peer], "ncclSend"}}
	case x.name == "ncclBroadcast" && c.rank != x.peer:
		return []box{{c.id, c.ranks[x.peer], "collective"}}
	case x.name == "ncclAllGather":
		for _, r := range c.ranks {
			if r != c.link.self {
				list = append(list, box{c.id, r, "collective"})
			}
		}
	}
	return list
}

// comes copies received data and compares it with the call.
func (x *wireCall) comes(w *Wire, from []box) error {
	if x.c.dead.Load() {
		return nil
	}
	put := func(at driver.Address, b []byte) error {
		mem, err := w.d.Bytes(at, x.bytes)
		if err == nil {
			copy(mem, b)
		}
		return err
	}
	var err error
	for _, b := range from {
		got := x.c.link.take(b)
		kind := x.name
		if kind == "ncclRecv" {
			kind = "ncclSend"
		}
		if got.Kind != kind || got.Number != x.number || int64(len(got.Bytes)) != x.bytes {
			w.mu.Lock()
			err = w.wrong(x.name, "rank %d wants %d bytes of call %d, and rank %d has sent %d of %s %d", x.c.rank, x.bytes, x.number, got.From, len(got.Bytes), got.Kind, got.Number)
			w.mu.Unlock()
			return err
		}
		at := x.at
		if x.name == "ncclAllGather" {
			at = x.out + driver.Address(int64(slices.Index(x.c.ranks, got.From))*x.bytes)
		}
		if err = put(at, got.Bytes); err != nil {
			return err
		}
	}
	if own := x.out + driver.Address(int64(x.c.rank)*x.bytes); x.name == "ncclAllGather" && own != x.at {
		mem, e := w.d.Bytes(x.at, x.bytes)
		if err = e; err == nil {
			err = put(own, mem)
		}
	}
	return err
}
