package cpu

import (
	"fmt"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
)

// poisonByte, repeated, is NaN in every float type.
const poisonByte = 0xFF

func poison(b []byte) {
	if len(b) == 0 {
		return
	}
	b[0] = poisonByte
	for n := 1; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

// Copy binds a copy of src to dst. The ranges must have the same length and must not overlap,
// unless they are identical. Disk memory can be copied only from or to host memory.
func (c *Context) Copy(label string, dst, src device.Ptr) (device.Kernel, error) {
	fail := func(what string, err error) (device.Kernel, error) {
		return nil, fmt.Errorf("rank %d: copy %q: %s: %w", c.rank, label, what, err)
	}
	if _, err := c.own(dst); err != nil {
		return fail("destination", err)
	}
	if _, err := c.own(src); err != nil {
		return fail("source", err)
	}
	if dst.Len != src.Len {
		return fail("length", fmt.Errorf("destination has %d bytes, source %d", dst.Len, src.Len))
	}
	if dst.Overlaps(src) && dst != src {
		return fail("operands", fmt.Errorf("bytes [%d, %d) and [%d, %d) overlap", dst.Off, dst.Off+dst.Len, src.Off, src.Off+src.Len))
	}
	if dst.Arena.Space() == graph.Disk || src.Arena.Space() == graph.Disk {
		k, err := bindDisk(label, dst, src)
		if err != nil {
			return fail("operands", err)
		}
		return k, nil
	}
	d, err := Bytes(dst)
	if err != nil {
		return fail("destination", err)
	}
	s, err := Bytes(src)
	if err != nil {
		return fail("source", err)
	}
	return &copyKernel{label: label, touches: [2]device.Ptr{dst, src}, dst: d, src: s}, nil
}

type copyKernel struct {
	label    string
	touches  [2]device.Ptr
	dst, src []byte
}

func (k *copyKernel) Label() string         { return k.label }
func (k *copyKernel) Touches() []device.Ptr { return k.touches[:] }
func (k *copyKernel) Run() error            { copy(k.dst, k.src); return nil }

// Poison binds a fill of p with 0xFF bytes.
func (c *Context) Poison(label string, p device.Ptr) (device.Kernel, error) {
	if _, err := c.own(p); err != nil {
		return nil, fmt.Errorf("rank %d: poison %q: %w", c.rank, label, err)
	}
	if a := p.Arena.(*Arena); a.disk != nil {
		return &diskKernel{label: label, touches: [2]device.Ptr{p}, operands: 1, transfer: a.disk.Fill(p.Off, p.Len, poisonByte)}, nil
	}
	b, err := Bytes(p)
	if err != nil {
		return nil, fmt.Errorf("rank %d: poison %q: %w", c.rank, label, err)
	}
	return &poisonKernel{label: label, touches: [1]device.Ptr{p}, mem: b}, nil
}

type poisonKernel struct {
	label   string
	touches [1]device.Ptr
	mem     []byte
}

func (k *poisonKernel) Label() string         { return k.label }
func (k *poisonKernel) Touches() []device.Ptr { return k.touches[:] }
func (k *poisonKernel) Run() error            { poison(k.mem); return nil }

// diskKernel moves bytes from or to disk memory; its stream waits for it.
type diskKernel struct {
	label    string
	touches  [2]device.Ptr
	operands int
	transfer device.Transfer
}

func (k *diskKernel) Label() string         { return k.label }
func (k *diskKernel) Touches() []device.Ptr { return k.touches[:k.operands] }
func (k *diskKernel) Run() error            { return k.transfer.Run() }

func bindDisk(label string, dst, src device.Ptr) (device.Kernel, error) {
	d, s := dst.Arena.(*Arena), src.Arena.(*Arena)
	k := &diskKernel{label: label, touches: [2]device.Ptr{dst, src}, operands: 2}
	switch {
	case d.space == graph.Disk && s.space == graph.Host:
		b, err := Bytes(src)
		if err != nil {
			return nil, err
		}
		k.transfer = d.disk.Store(b, dst.Off)
	case d.space == graph.Host && s.space == graph.Disk:
		b, err := Bytes(dst)
		if err != nil {
			return nil, err
		}
		k.transfer = s.disk.Load(b, src.Off)
	default:
		return nil, fmt.Errorf("%s memory to %s memory: only host memory exchanges bytes with disk memory, go through it", s.space, d.space)
	}
	return k, nil
}

// DiskTraffic returns the bytes that the rank's copies have moved from and to disk so far.
func (c *Context) DiskTraffic() (sum device.Traffic) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, d := range c.disks {
		t := d.Traffic()
		sum.Read += t.Read
		sum.Written += t.Written
	}
	return sum
}
