package exec

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
)

// Write stores data at byte offset off of a buffer in any memory space. It runs after all
// operations that are already enqueued, and returns when the data is stored. Memory that the host
// cannot address is written through the program's staging buffer, in pieces of at most that
// buffer's size.
func (e *Executor) Write(id graph.BufID, off int64, data []byte) error {
	return e.transfer("write", id, off, data, false)
}

// Read does the same as Write in the other direction: it loads bytes from byte offset off of a
// buffer into data.
func (e *Executor) Read(id graph.BufID, off int64, data []byte) error {
	return e.transfer("read", id, off, data, true)
}

func (e *Executor) transfer(verb string, id graph.BufID, off int64, data []byte, read bool) error {
	fail := func(err error) error {
		name := fmt.Sprintf("buffer %d", id)
		if id >= 0 && int(id) < len(e.cfg.Program.Buffers) {
			name = e.cfg.Program.Buf(id).Name
		}
		return fmt.Errorf("exec: rank %d: %s %d bytes at byte %d of %s: %w", e.rank, verb, len(data), off, name, err)
	}
	if e.closed {
		return fail(errors.New("the executor is closed"))
	}
	p, err := e.ptr(id)
	if err != nil {
		return fail(err)
	}
	n := int64(len(data))
	if p.Arena == nil || off < 0 || off > p.Len-n {
		return fail(fmt.Errorf("it has %d bytes", p.Len))
	}
	if err := e.Sync(); err != nil {
		return fail(err)
	}
	var b []byte // the buffer, if the host can address it
	reached := p.Arena.Space() == graph.Host
	if reached {
		if b, err = e.cfg.Context.HostBytes(p); err != nil {
			return fail(err)
		}
	} else if m, ok := e.cfg.Context.(device.Reachable); ok {
		b, reached = m.Reach(p)
	}
	if reached {
		if read {
			copy(data, b[off:])
		} else {
			copy(b[off:], data)
		}
		return nil
	}
	staging, err := e.ptr(e.cfg.Program.Port(graph.PortStaging))
	if err != nil {
		return fail(fmt.Errorf("staging: %w", err))
	}
	if staging.Len == 0 {
		return fail(errors.New("the program has no staging buffer"))
	}
	window, err := e.cfg.Context.HostBytes(staging)
	if err != nil {
		return fail(fmt.Errorf("staging: %w", err))
	}
	queue := graph.CopyIn
	if read {
		queue = graph.CopyOut
	}
	s, err := e.stream(queue)
	if err != nil {
		return fail(err)
	}
	for done := int64(0); done < n; done += int64(len(window)) {
		chunk := data[done:min(n, done+int64(len(window)))]
		there := device.Ptr{Arena: p.Arena, Off: p.Off + off + done, Len: int64(len(chunk))}
		here := device.Ptr{Arena: staging.Arena, Off: staging.Off, Len: int64(len(chunk))}
		dst, src := there, here
		if read {
			dst, src = here, there
		} else {
			copy(window, chunk)
		}
		k, err := e.cfg.Context.Copy(verb+" "+e.cfg.Program.Buf(id).Name, dst, src)
		if err != nil {
			return fail(err)
		}
		e.tracks[queue].launch(nil)
		if err := s.Launch(k); err != nil {
			return fail(e.stop(err))
		}
		if err := s.Sync(); err != nil {
			return fail(e.stop(err))
		}
		if read {
			copy(chunk, window)
		}
	}
	return nil
}

// Scalar waits for all enqueued operations and returns the value of an f64 buffer with one element,
// in any memory space. Only the first call for a buffer allocates memory.
func (e *Executor) Scalar(id graph.BufID) (float64, error) {
	fail := func(err error) (float64, error) {
		return 0, fmt.Errorf("exec: rank %d: scalar in buffer %d: %w", e.rank, id, err)
	}
	if id == graph.NoBuf {
		return fail(errors.New("the program lacks it"))
	}
	if b := e.cfg.Program.Buf(id); b.DType != graph.F64 || b.Elems() != 1 {
		return fail(fmt.Errorf("%q is %s of %d elements, want one f64", b.Name, b.DType, b.Elems()))
	}
	if e.cfg.Program.Buf(id).Space == graph.Host {
		v, err := e.HostF64(id)
		if err != nil {
			return fail(err)
		}
		return v[0], nil
	}
	staging, err := e.ptr(e.cfg.Program.Port(graph.PortStaging))
	if err == nil && staging.Len < 8 {
		err = errors.New("the program has no staging buffer")
	}
	if err != nil {
		return fail(err)
	}
	staging.Len = 8
	k := e.peek[id]
	if k == nil {
		there, err := e.ptr(id)
		if err != nil {
			return fail(err)
		}
		if k, err = e.cfg.Context.Copy("peek "+e.cfg.Program.Buf(id).Name, staging, there); err != nil {
			return fail(err)
		}
		if e.peek == nil {
			e.peek = map[graph.BufID]device.Kernel{}
		}
		e.peek[id] = k
	}
	s, err := e.stream(graph.CopyOut)
	if err != nil {
		return fail(err)
	}
	e.tracks[graph.CopyOut].launch(nil)
	if err := s.Launch(k); err != nil {
		return fail(e.stop(err))
	}
	if err := s.Sync(); err != nil {
		return fail(e.stop(err))
	}
	b, err := e.cfg.Context.HostBytes(staging)
	if err != nil {
		return fail(err)
	}
	return math.Float64frombits(binary.LittleEndian.Uint64(b)), nil
}
