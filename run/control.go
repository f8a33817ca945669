package run

import (
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/nccl"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
)

// shower is a Joined whose watchdog is shown where ranks are in operations that another
// transport runs.
type shower interface {
	Show(rank, slot int, p watch.Progress)
}

// control is what ranks on GPUs of several processes have beside NCCL: the transport of
// their processes, on the host. It is for one rank of the process.
type control struct {
	shower
	joined Joined
	group  comm.Group // all ranks
	calls  uint64     // collectives of group
}

var _ nccl.Control = (*control)(nil)

func newControl(joined Joined, rank int) (*control, error) {
	s, ok := joined.(shower)
	if !ok {
		return nil, fmt.Errorf("a transport (%T) that watches no other's operations", joined)
	}
	groups, err := joined.Groups(rank)
	if err != nil {
		return nil, err
	}
	return &control{shower: s, joined: joined, group: groups[-1]}, nil
}

// Gather gives every rank what each has said.
func (c *control) Gather(rank int, own []byte) (said [][]byte, err error) {
	ctx := cpu.New(rank, cpu.Options{Map: c.joined.Map(rank)})
	defer func() { err = errors.Join(err, ctx.Close()) }()
	shard, all := int64(len(own)), int64(len(own)*c.group.Size())
	arena, err := ctx.Alloc(graph.Device, shard+all)
	if err != nil {
		return nil, err
	}
	in, out := device.Ptr{Arena: arena, Off: all, Len: shard}, device.Ptr{Arena: arena, Len: all}
	k, err := c.group.AllGather("who the ranks are", in, out, graph.I8)
	if err != nil {
		return nil, err
	}
	mem, err := cpu.Bytes(device.Ptr{Arena: arena, Len: shard + all})
	if err != nil {
		return nil, err
	}
	copy(mem[all:], own)
	s, err := ctx.NewStream(graph.Comm)
	if err != nil {
		return nil, err
	}
	c.calls++
	if err := s.Launch(k); err != nil {
		return nil, err
	}
	if err := s.Sync(); err != nil {
		return nil, err
	}
	for i := range c.group.Size() {
		said = append(said, append([]byte(nil), mem[int64(i)*shard:int64(i+1)*shard]...))
	}
	return said, nil
}

// Show counts on from the host's own calls.
func (c *control) Show(rank, slot int, p watch.Progress) {
	if slot == 0 {
		p.Call += c.calls
	}
	c.shower.Show(rank, slot, p)
}

// Abort ends the job, Err is what has ended it, and OnError tells.
func (c *control) Abort(err error)       { c.group.Abort(err) }
func (c *control) Err() error            { return c.group.Err() }
func (c *control) OnError(f func(error)) { c.group.OnError(f) }
