package mpi

import (
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/direct"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
)

// Run runs the operation. It returns when no peer reads the rank's inputs any more.
func (k *kernel) Run() error {
	m, w := k.m, k.m.world
	if err := m.Enter(k.Call); err != nil {
		return err
	}
	defer m.Leave()
	if err := w.Err(); err != nil {
		return err
	}
	point := k.Sig.Op == comm.SendRecv
	if !point {
		m.calls++
	}
	w.show(k, watch.Waiting)
	record := &w.flights[m.World-w.first]
	entry := record.begin(k.text, m.calls, k.Sig.Bytes)
	if err := w.awaitGroups(); err != nil {
		return err
	}
	read, written, err := k.meetAndMove()
	if err != nil {
		return err
	}
	w.show(k, watch.Idle)
	record.end(entry)
	sent := k.Sent
	if point && !k.Sends() {
		sent = 0
	}
	m.Add(sent, read, written)
	return nil
}

// meetAndMove runs the operation once every rank has come with the same one. A short
// operation's bytes travel with the headers, and are used only after the headers agree.
func (k *kernel) meetAndMove() (read, written int64, err error) {
	w := k.m.world
	k.list = k.list[:0]
	k.addHeaders()
	if k.short {
		return k.moveShort()
	}
	if err := w.run(&exchange{list: slices.Clone(k.list)}); err != nil {
		return 0, 0, w.failed(k, err)
	}
	if i := k.differs(); i >= 0 {
		return 0, 0, k.mismatch(i)
	}
	w.show(k, watch.Moving)
	if read, written, err = k.move(); err != nil {
		return 0, 0, w.failed(k, err)
	}
	return read, written, nil
}

func (m *member) bind(c comm.Call) (device.Kernel, error) {
	k := &kernel{Call: c, m: m, text: fmt.Sprintf("%s %q", c.Sig.Op, c.Name), ranks: m.Global, at: m.Index}
	if c.Sig.Op == comm.SendRecv {
		k.ranks, k.at = []int{m.Global[c.Peer], m.World}, 1
	}
	for _, x := range []struct {
		p   device.Ptr
		mem *[]byte
	}{{c.In, &k.in}, {c.Out, &k.out}} {
		if x.p.Arena == nil {
			continue
		}
		b, err := cpu.Bytes(x.p)
		if err != nil {
			return nil, err
		}
		*x.mem, k.own = b, x.p
	}
	if c.Round != nil {
		k.with = partners(c.Round, m.Index)
	}
	if c.Sig.Op == comm.ReduceScatter || c.Sig.Op == comm.AllReduce {
		var err error
		if k.adder, err = direct.NewAdder(c.Sig.DType, c.Sig.Order, m.Ranks); err != nil {
			return nil, err
		}
		if err := k.adder.Square(c.Squares); err != nil {
			return nil, err
		}
		size := c.Sig.DType.Size()
		for _, p := range c.Touches() {
			if p.Off%size != 0 {
				return nil, fmt.Errorf("byte %d is not a multiple of the %d of an element", p.Off, size)
			}
		}
	}
	k.srcs = make([][]byte, len(k.ranks))
	k.short = k.isShort()
	return k, nil
}
