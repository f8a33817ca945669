package cuda

import (
	"fmt"
	"unsafe"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

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
// unless they are identical. The GPU runs copies from or to device memory; the host runs copies
// within host memory and from or to disk memory. Disk memory can be copied only from or to host
// memory.
func (c *Context) Copy(label string, dst, src device.Ptr) (device.Kernel, error) {
	fail := func(what string, err error) (device.Kernel, error) {
		return nil, fmt.Errorf("rank %d: copy %q: %s: %w", c.rank, label, what, err)
	}
	d, err := c.own(dst)
	if err != nil {
		return fail("destination", err)
	}
	s, err := c.own(src)
	if err != nil {
		return fail("source", err)
	}
	if dst.Len != src.Len {
		return fail("length", fmt.Errorf("destination has %d bytes, source %d", dst.Len, src.Len))
	}
	if dst.Overlaps(src) && dst != src {
		return fail("operands", fmt.Errorf("bytes [%d, %d) and [%d, %d) overlap", dst.Off, dst.Off+dst.Len, src.Off, src.Off+src.Len))
	}
	if c.closed {
		return fail("operands", errClosed)
	}
	m := movement{label: label, touches: [2]device.Ptr{dst, src}, operands: 2}
	part := func(a *Arena, p device.Ptr) []byte { return a.mem[p.Off : p.Off+p.Len : p.Off+p.Len] }
	switch {
	case d.space == graph.Disk && s.space == graph.Host:
		return &diskKernel{m, d.disk.Store(part(s, src), dst.Off)}, nil
	case d.space == graph.Host && s.space == graph.Disk:
		return &diskKernel{m, s.disk.Load(part(d, dst), src.Off)}, nil
	case d.space == graph.Disk || s.space == graph.Disk:
		return fail("operands", fmt.Errorf("%s memory to %s memory: only host memory exchanges bytes with disk memory, go through it", s.space, d.space))
	case d.space == graph.Host && s.space == graph.Host:
		return &hostCopy{m, part(d, dst), part(s, src)}, nil
	}
	return &copyKernel{movement: m, dst: d, src: s, to: d.at + driver.Address(dst.Off), from: s.at + driver.Address(src.Off)}, nil
}

// movement is a kernel that writes its first operand: a copy of the second operand, or a fill
// if there is none.
type movement struct {
	label    string
	touches  [2]device.Ptr
	operands int
}

func (m *movement) Label() string         { return m.label }
func (m *movement) Touches() []device.Ptr { return m.touches[:m.operands] }
func (m *movement) Reads() []device.Ptr   { return m.touches[1:m.operands] }
func (m *movement) Writes() []device.Ptr  { return m.touches[:1] }

type copyKernel struct {
	movement
	dst, src *Arena
	to, from driver.Address
}

func (k *copyKernel) Enqueue(api driver.API, s driver.Stream) error {
	n := k.touches[0].Len
	switch {
	case n == 0 || k.to == k.from:
		return nil
	case k.dst.space == graph.Host:
		return api.CopyToHost(unsafe.Pointer(&k.dst.mem[k.touches[0].Off]), k.from, n, s)
	case k.src.space == graph.Host:
		return api.CopyToDevice(k.to, unsafe.Pointer(&k.src.mem[k.touches[1].Off]), n, s)
	}
	return api.CopyOnDevice(k.to, k.from, n, s)
}

type hostCopy struct {
	movement
	dst, src []byte
}

func (k *hostCopy) Run() error { copy(k.dst, k.src); return nil }

// diskKernel moves bytes from or to the disk tier. The host does it, and the stream waits until it is
// done.
type diskKernel struct {
	movement
	transfer device.Transfer
}

func (k *diskKernel) Run() error { return k.transfer.Run() }

// Poison binds a fill of p with 0xFF bytes.
func (c *Context) Poison(label string, p device.Ptr) (device.Kernel, error) {
	a, err := c.own(p)
	if err == nil && c.closed {
		err = errClosed
	}
	if err != nil {
		return nil, fmt.Errorf("rank %d: poison %q: %w", c.rank, label, err)
	}
	m := movement{label: label, touches: [2]device.Ptr{p}, operands: 1}
	switch a.space {
	case graph.Disk:
		return &diskKernel{m, a.disk.Fill(p.Off, p.Len, poisonByte)}, nil
	case graph.Host:
		return &hostPoison{m, a.mem[p.Off : p.Off+p.Len : p.Off+p.Len]}, nil
	}
	return &poisonKernel{m, a.at + driver.Address(p.Off)}, nil
}

type poisonKernel struct {
	movement
	at driver.Address
}

func (k *poisonKernel) Enqueue(api driver.API, s driver.Stream) error {
	if k.touches[0].Len == 0 {
		return nil
	}
	return api.Fill8(k.at, poisonByte, k.touches[0].Len, s)
}

type hostPoison struct {
	movement
	mem []byte
}

func (k *hostPoison) Run() error { poison(k.mem); return nil }
