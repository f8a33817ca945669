package cuda

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// Arena is a rank's memory in one space: device memory, page-locked host memory of exactly the
// arena's size, or storage on disk.
type Arena struct {
	ctx     *Context
	space   graph.Space
	size    int64
	at      driver.Address // address of device or host memory
	mem     []byte         // the memory, if it is host memory
	disk    device.Disk
	touched atomic.Int64
}

// Space returns the arena's memory space.
func (a *Arena) Space() graph.Space { return a.space }

// Size returns the arena's length in bytes.
func (a *Arena) Size() int64 { return a.size }

// Touched returns the highest offset + length that executed work has accessed. Device work
// counts from the next Sync of its stream on.
func (a *Arena) Touched() int64 { return a.touched.Load() }

// Rank returns the rank that the arena belongs to.
func (a *Arena) Rank() int { return a.ctx.rank }

func (a *Arena) touch(end int64) {
	for {
		old := a.touched.Load()
		if end <= old || a.touched.CompareAndSwap(old, end) {
			return
		}
	}
}

// HostMemory returns the memory of an arena in graph.Host, so that CPU kernels can use it
// (cpu.HostMemory).
func (a *Arena) HostMemory() ([]byte, error) {
	if a.space != graph.Host {
		return nil, fmt.Errorf("the range is in the GPU's %s memory, which the host doesn't reach", a.space)
	}
	if a.mem == nil {
		return nil, errClosed
	}
	return a.mem, nil
}

// Address returns the GPU address of the arena's first byte; 0 for disk memory and after
// Close.
func (a *Arena) Address() driver.Address { return a.at }

var (
	_ Addressed      = (*Arena)(nil)
	_ cpu.HostMemory = (*Arena)(nil)
)

// Address returns the GPU address of p, a range of an arena in graph.Device or graph.Host.
// Kernels may keep it when they are bound.
func Address(p device.Ptr) (driver.Address, error) {
	a, ok := p.Arena.(Addressed)
	if !ok {
		if p.Arena == nil {
			return 0, errors.New("the operand is absent")
		}
		return 0, fmt.Errorf("not memory of the CUDA device (%T)", p.Arena)
	}
	if err := p.Check(); err != nil {
		return 0, err
	}
	if a.Space() == graph.Disk {
		return 0, fmt.Errorf("the range is in %s memory, which only copies reach", graph.Disk)
	}
	at := a.Address()
	if at == 0 {
		return 0, errClosed
	}
	return at + driver.Address(p.Off), nil
}

// Alloc allocates an arena: device memory by one plain allocation, host memory page-locked.
// The initial content is undefined. If the GPU's memory is not sufficient, the error says how
// much is free.
func (c *Context) Alloc(space graph.Space, bytes int64) (device.Arena, error) {
	fail := func(err error) (device.Arena, error) {
		return nil, fmt.Errorf("rank %d: allocate %d bytes of %s memory: %w", c.rank, bytes, space, err)
	}
	switch {
	case c.closed:
		return fail(errClosed)
	case bytes <= 0:
		return fail(errors.New("want a positive size"))
	case space >= graph.NumSpaces:
		return fail(errors.New("the CUDA device has device, host and disk memory"))
	case space == graph.Disk && c.opts.Disk == nil:
		return fail(errors.New("the rank was given no folder for it (Config.Disk DIR)"))
	}
	if limit := c.opts.Capacity[space]; limit > 0 && bytes > limit-c.used[space] {
		return fail(fmt.Errorf("the capacity is %d bytes, of which %d are in use", limit, c.used[space]))
	}
	a := &Arena{ctx: c, space: space, size: bytes}
	switch space {
	case graph.Device:
		at, err := c.api.Alloc(bytes)
		if err != nil {
			if free, total, e := c.api.MemInfo(); e == nil {
				err = fmt.Errorf("%w; %d of the GPU's %d bytes are free", err, free, total)
			}
			return fail(err)
		}
		a.at = at
		if c.opts.Poison {
			if err := c.fillNow(at, bytes); err != nil {
				return fail(errors.Join(err, c.api.Free(at)))
			}
		}
	case graph.Host:
		p, at, err := c.api.HostAlloc(bytes)
		if err != nil {
			return fail(fmt.Errorf("page-locked: %w", err))
		}
		a.at, a.mem = at, unsafe.Slice((*byte)(p), bytes)
		if c.opts.Poison {
			poison(a.mem)
		}
	default:
		initial := byte(0)
		if c.opts.Poison {
			initial = poisonByte
		}
		disk, err := c.opts.Disk(c.rank, bytes, initial)
		if err != nil {
			return fail(err)
		}
		a.disk = disk
		c.mu.Lock()
		c.disks = append(c.disks, disk)
		c.mu.Unlock()
	}
	c.used[space] += bytes
	c.arenas = append(c.arenas, a)
	return a, nil
}

// fillNow poisons fresh device memory.
func (c *Context) fillNow(at driver.Address, bytes int64) error {
	s, err := c.api.NewStream()
	if err != nil {
		return err
	}
	err = c.api.Fill8(at, poisonByte, bytes, s)
	return errors.Join(err, c.api.Synchronize(s), c.api.DestroyStream(s))
}

func (a *Arena) free() (err error) {
	switch a.space {
	case graph.Device:
		err = a.ctx.api.Free(a.at)
	case graph.Host:
		err = a.ctx.api.HostFree(unsafe.Pointer(unsafe.SliceData(a.mem)))
	default:
		err = a.disk.Close()
	}
	a.at, a.mem = 0, nil
	return err
}

// HostBytes returns the memory of a range of a host arena of this rank.
func (c *Context) HostBytes(p device.Ptr) ([]byte, error) {
	a, err := c.own(p)
	if err != nil {
		return nil, fmt.Errorf("rank %d: host view: %w", c.rank, err)
	}
	if a.space != graph.Host {
		return nil, fmt.Errorf("rank %d: host view: the range is in %s memory, want host memory", c.rank, a.space)
	}
	if a.mem == nil {
		return nil, fmt.Errorf("rank %d: host view: %w", c.rank, errClosed)
	}
	return a.mem[p.Off : p.Off+p.Len : p.Off+p.Len], nil
}

// own returns p's arena if p lies in an arena of this context.
func (c *Context) own(p device.Ptr) (*Arena, error) {
	a, ok := p.Arena.(*Arena)
	if !ok {
		return nil, fmt.Errorf("not memory of the CUDA device (%T)", p.Arena)
	}
	if a.ctx != c {
		return nil, fmt.Errorf("memory of rank %d, want rank %d's own", a.ctx.rank, c.rank)
	}
	if err := p.Check(); err != nil {
		return nil, err
	}
	return a, nil
}

// Operand returns the GPU address of a collective's operand, which must be in device memory,
// and the operand as a list. For an absent operand it returns 0 and nil.
func Operand(p device.Ptr) (driver.Address, []device.Ptr, error) {
	if p.Arena == nil {
		return 0, nil, nil
	}
	at, err := Address(p)
	if err == nil && p.Arena.Space() != graph.Device {
		err = fmt.Errorf("the range is in %s memory, want the GPU's", p.Arena.Space())
	}
	if err != nil {
		return 0, nil, err
	}
	return at, []device.Ptr{p}, nil
}
