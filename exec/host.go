package exec

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/spillway-ml/spillway/graph"
)

// HostF64 returns the contents of an f64 buffer in host memory. The caller may read them after
// Sync, and write them in the argument before of RunSection.
func (e *Executor) HostF64(id graph.BufID) ([]float64, error) { return host[float64](e, id, graph.F64) }

// HostF32 does the same as HostF64 for f32 buffers.
func (e *Executor) HostF32(id graph.BufID) ([]float32, error) { return host[float32](e, id, graph.F32) }

// HostI64 does the same as HostF64 for i64 buffers.
func (e *Executor) HostI64(id graph.BufID) ([]int64, error) { return host[int64](e, id, graph.I64) }

// HostI32 does the same as HostF64 for i32 buffers.
func (e *Executor) HostI32(id graph.BufID) ([]int32, error) { return host[int32](e, id, graph.I32) }

// HostBytes does the same as HostF64 for a buffer of any type, as bytes.
func (e *Executor) HostBytes(id graph.BufID) ([]byte, error) {
	fail := func(err error) ([]byte, error) {
		return nil, fmt.Errorf("exec: rank %d: host view of buffer %d: %w", e.rank, id, err)
	}
	if id == graph.NoBuf {
		return fail(errors.New("the program lacks it"))
	}
	p, err := e.ptr(id)
	if err != nil {
		return fail(err)
	}
	b, err := e.cfg.Context.HostBytes(p)
	if err != nil {
		return fail(err)
	}
	return b, nil
}

func host[T float64 | float32 | int64 | int32](e *Executor, id graph.BufID, dtype graph.DType) ([]T, error) {
	b, err := e.HostBytes(id)
	if err != nil || len(b) == 0 {
		return nil, err
	}
	if of := e.cfg.Program.Buf(id); of.DType != dtype {
		return nil, fmt.Errorf("exec: rank %d: host view of buffer %d: %q has dtype %s, want %s", e.rank, id, of.Name, of.DType, dtype)
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), int64(len(b))/dtype.Size()), nil
}
