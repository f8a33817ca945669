package gpu

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/nccl"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/platform"
)

// shower is a Joined whose watchdog can also watch ranks' operations on another transport.
type shower interface {
	Show(rank, slot int, p watch.Progress)
}

// control connects ranks on GPUs of several processes in addition to NCCL: it uses their
// processes' transport on the host.
type control struct {
	shower
	joined platform.Joined
	group  comm.Group          // all ranks, from the first rank of this process
	ranks  map[int]*controlled // ranks of this process
}

// controlled is one rank.
type controlled struct {
	group comm.Group    // all ranks
	calls atomic.Uint64 // number of group's collectives
}

var _ nccl.Control = (*control)(nil)

func newControl(joined platform.Joined, local []int) (*control, error) {
	s, ok := joined.(shower)
	if !ok {
		return nil, fmt.Errorf("a transport (%T) that watches no other's operations", joined)
	}
	c := &control{shower: s, joined: joined, ranks: map[int]*controlled{}}
	for _, rank := range local {
		groups, err := joined.Groups(rank)
		if err != nil {
			return nil, err
		}
		c.ranks[rank] = &controlled{group: groups[-1]}
	}
	c.group = c.ranks[local[0]].group
	return c, nil
}

// Gather sends own to every rank and returns the messages of all ranks, by rank.
func (c *control) Gather(rank int, own []byte) (said [][]byte, err error) {
	ctx := cpu.New(rank, cpu.Options{Map: c.joined.Map(rank)})
	defer func() { err = errors.Join(err, ctx.Close()) }()
	shard, all := int64(len(own)), int64(len(own)*c.group.Size())
	arena, err := ctx.Alloc(graph.Device, shard+all)
	if err != nil {
		return nil, err
	}
	in, out := device.Ptr{Arena: arena, Off: all, Len: shard}, device.Ptr{Arena: arena, Len: all}
	k, err := c.ranks[rank].group.AllGather("who the ranks are", in, out, graph.I8)
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
	c.ranks[rank].calls.Add(1)
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

// Show reports a rank's progress to the watchdog; its numbering continues after the host
// transport's own calls.
func (c *control) Show(rank, slot int, p watch.Progress) {
	if slot == 0 {
		p.Call += c.ranks[rank].calls.Load()
	}
	c.shower.Show(rank, slot, p)
}

// Abort ends the job, Err returns the error that ended it, and OnError sets its callback.
func (c *control) Abort(err error)       { c.group.Abort(err) }
func (c *control) Err() error            { return c.group.Err() }
func (c *control) OnError(f func(error)) { c.group.OnError(f) }
