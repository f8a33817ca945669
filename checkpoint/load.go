package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"unsafe"

	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/safetensors"
)

// Want is a range of elements of one tensor's state that the caller loads.
type Want struct {
	State, Tensor string
	Start, N      int64
}

// Loading says how states are loaded.
type Loading struct {
	// Sink receives elements from start on, in order, ChunkElems at a time counted from the
	// start of a Want. v is reused after the call.
	Sink func(state, tensor string, start int64, v []float32) error
	// Dequantize turns the 8-bit codes of one block into values, for all states but ModelState.
	// If it is nil, such states are errors.
	Dequantize func(state string, dst []float32, codes []byte, scale float32) error
}

// ChunkElems is the number of elements that Loading.Sink gets at a time: a multiple of QuantBlock.
const ChunkElems = 1 << 18

// Load reads the wanted elements of a checkpoint of any version, each byte once. It reads no
// other bytes, except the rest of extents that are needed in part. Overlapping wants are
// merged. All data read is compared with its checksums, except in versions 1 and 2, which
// Verify reads. Errors wrap ErrDamaged where the files are at fault.
func (c *Checkpoint) Load(ctx context.Context, wants []Want, how Loading) error {
	wants = joined(wants)
	if c.Manifest.Version < sharded {
		return c.loadWhole(ctx, wants, how)
	}
	s, err := c.States()
	if err != nil {
		return err
	}
	l := &loader{States: s, how: how}
	return l.load(ctx, wants)
}

// Contents describes the tensors of a checkpoint of any version, by name.
func (c *Checkpoint) Contents() (map[string]Tensor, error) {
	m := c.Manifest
	all := map[string]Tensor{}
	for _, t := range m.Tensors {
		all[t.Name] = t
	}
	if m.Version >= sharded {
		return all, nil
	}
	for _, state := range m.States() {
		r, err := c.State(state)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrDamaged, err)
		}
		for _, found := range r.Tensors() {
			t := all[found.Name]
			t.Name, t.States = found.Name, append(t.States, state)
			if state == ModelState {
				t.Shape = found.Shape
			}
			all[found.Name] = t
		}
		if err := r.Close(); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// joined merges overlapping wants of a tensor. Tensors' states stay in the order in which they
// first occur.
func joined(wants []Want) (out []Want) {
	type key struct{ state, tensor string }
	first := map[key]int{}
	for i, w := range wants {
		k := key{w.State, w.Tensor}
		if _, ok := first[k]; !ok {
			first[k] = i
		}
	}
	sorted := slices.Clone(wants)
	slices.SortStableFunc(sorted, func(a, b Want) int {
		return cmp.Or(cmp.Compare(first[key{a.State, a.Tensor}], first[key{b.State, b.Tensor}]), cmp.Compare(a.Start, b.Start))
	})
	for _, w := range sorted {
		if w.N <= 0 {
			continue
		}
		if n := len(out); n > 0 && out[n-1].State == w.State && out[n-1].Tensor == w.Tensor && out[n-1].Start+out[n-1].N >= w.Start {
			out[n-1].N = max(out[n-1].N, w.Start+w.N-out[n-1].Start)
		} else {
			out = append(out, w)
		}
	}
	return out
}

// loadWhole is Load of a version whose files hold whole tensors in fp32.
func (c *Checkpoint) loadWhole(ctx context.Context, wants []Want, how Loading) error {
	open := map[string]Tensors{}
	defer func() {
		for _, r := range open {
			_ = r.Close()
		}
	}()
	chunk := make([]float32, ChunkElems)
	for _, w := range wants {
		r := open[w.State]
		if r == nil {
			var err error
			if r, err = c.State(w.State); err != nil {
				return err
			}
			open[w.State] = r
		}
		for at := int64(0); at < w.N; {
			if err := ctx.Err(); err != nil {
				return err
			}
			v := chunk[:min(int64(len(chunk)), w.N-at)]
			if err := r.ReadFloat32(w.Tensor, w.Start+at, v); err != nil {
				return err
			}
			if err := how.Sink(w.State, w.Tensor, w.Start+at, v); err != nil {
				return err
			}
			at += int64(len(v))
		}
	}
	return nil
}

// loadDepth is how many spans have memory at once: being read, compared with their checksums,
// or given to the sink. The 2 beyond filesys.Depth are for checking and the sink, so the disk
// always has filesys.Depth reads queued.
const loadDepth = filesys.Depth + 2

// loader reads spans ahead of the one that it gives to the sink.
type loader struct {
	*States
	how   Loading
	chunk []float32 // created if a want's values are not in one extent
	wide  []float32 // an extent's values, if they are not stored as fp32

	direct []filesys.File // by file; nil: through the page cache
	have   int            // elements in chunk
}

// span is a range of a file that is read at once, with the extents in it.
type span struct {
	file    int
	lo, hi  int64
	extents []*located
	memory  []byte
	b       []byte // of [lo, hi)
	done    chan error
}

// spans lists the ranges to be read, in the order of the wants, with neighbouring extents
// together.
func (l *loader) spans(wants []Want) (list []*span, err error) {
	for _, w := range wants {
		have := l.extents[w.State][w.Tensor]
		if len(have) == 0 || w.Start < 0 || w.Start+w.N > have[len(have)-1].Start+have[len(have)-1].N {
			return nil, fmt.Errorf("%w: %s has no elements %d to %d of %s of %q", ErrDamaged, l.folder, w.Start, w.Start+w.N, w.State, w.Tensor)
		}
		for i := find(have, w.Start); i < len(have) && have[i].Start < w.Start+w.N; i++ {
			e := &have[i]
			if n := len(list); n > 0 {
				last := list[n-1]
				if last.extents[len(last.extents)-1] == e {
					continue // the end of the previous want is in this extent too
				}
				if last.file == e.file && last.hi == e.at && e.at+e.Bytes()-last.lo <= filesys.BlockBytes {
					last.hi, last.extents = last.hi+e.Bytes(), append(last.extents, e)
					continue
				}
			}
			list = append(list, &span{file: e.file, lo: e.at, hi: e.at + e.Bytes(), extents: []*located{e}, done: make(chan error, 1)})
		}
	}
	return list, nil
}

func (l *loader) load(ctx context.Context, wants []Want) (err error) {
	list, err := l.spans(wants)
	if err != nil || len(list) == 0 {
		return err
	}
	if err := l.openDirect(); err != nil {
		return err
	}
	defer func() {
		for _, f := range l.direct {
			if f != nil {
				err = errors.Join(err, f.Close())
			}
		}
	}()
	const room = filesys.BlockBytes + 2*filesys.Alignment // a span may begin and end anywhere
	memory, err := filesys.MapPages(loadDepth * room)
	if err != nil {
		return err
	}
	free := make(chan []byte, loadDepth)
	for i := range loadDepth {
		free <- memory[i*room : (i+1)*room]
	}
	order := make(chan *span, loadDepth)
	stop := make(chan struct{})
	go func() {
		defer crash.Guard()
		defer close(order)
		for _, s := range list {
			select {
			case s.memory = <-free:
			case <-stop:
				return
			}
			go func() {
				defer crash.Guard()
				s.done <- l.fetch(s)
			}()
			order <- s
		}
	}()
	next, stopped := 0, false
	for s := range order {
		e := <-s.done
		if err == nil {
			err = cmp.Or(ctx.Err(), e)
		}
		if err == nil {
			next, err = l.hand(s, wants, next)
		}
		if err != nil && !stopped {
			close(stop)
			stopped = true
		}
		free <- s.memory
	}
	return errors.Join(err, filesys.UnmapPages(memory))
}

// openDirect opens large files a second time for direct I/O. A file that has lost its name
// since it was opened is read through the page cache.
func (l *loader) openDirect() error {
	l.direct = make([]filesys.File, len(l.files))
	for i, f := range l.files {
		st, err := f.Stat()
		if err != nil {
			return err
		}
		if st.Size < filesys.DirectBytes {
			continue
		}
		d, err := filesys.OpenDirect(l.c.f, filepath.Base(l.names[i]))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return faulty(err)
		}
		if d == nil {
			continue
		}
		if dst, err := d.Stat(); err != nil || !filesys.Same(st, dst) {
			err = errors.Join(err, d.Close())
			if err != nil {
				return faulty(err)
			}
			continue
		}
		l.direct[i] = d
	}
	return nil
}

// fetch reads a span from the disk and compares its extents with their checksums.
func (l *loader) fetch(s *span) error {
	if err := l.read(s); err != nil {
		return err
	}
	for _, e := range s.extents {
		if err := l.check(e, s.bytes(e)); err != nil {
			return err
		}
	}
	return nil
}

func (s *span) bytes(e *located) []byte { return s.b[e.at-s.lo:][:e.Bytes()] }

// read fills a span's memory from its file.
func (l *loader) read(s *span) error {
	f, lo, n := l.files[s.file], s.lo, s.hi-s.lo
	if d := l.direct[s.file]; d != nil {
		f, lo = d, s.lo/filesys.Alignment*filesys.Alignment
		n = filesys.RoundUp(s.hi - lo)
	}
	b := s.memory[:n]
	k, err := f.ReadAt(b, lo)
	if int64(k) < s.hi-lo {
		return fmt.Errorf("%w: %s: %w", ErrDamaged, l.names[s.file], cmp.Or(err, errors.New("the file became shorter")))
	}
	s.b = b[s.lo-lo : s.hi-lo]
	return nil
}

// hand gives the wanted elements of a span's extents to the sink. next is the index of the
// first incomplete want.
func (l *loader) hand(s *span, wants []Want, next int) (int, error) {
	for _, e := range s.extents {
		v, err := l.values(e, s.bytes(e))
		if err != nil {
			return next, err
		}
		for next < len(wants) {
			w := &wants[next]
			if w.State != e.State || w.Tensor != e.Tensor || w.Start >= e.Start+e.N {
				break
			}
			if err := l.give(w, e, v); err != nil {
				return next, err
			}
			if w.Start+w.N > e.Start+e.N {
				break // the want continues in the next extent
			}
			next++
		}
	}
	return next, nil
}

// values returns an extent's values; it reuses the extent's bytes where they already are fp32.
func (l *loader) values(e *located, b []byte) ([]float32, error) {
	if e.DType == safetensors.F32 && littleEndian && uintptr(unsafe.Pointer(&b[0]))%4 == 0 {
		return unsafe.Slice((*float32)(unsafe.Pointer(&b[0])), e.N), nil
	}
	if int64(len(l.wide)) < e.N {
		l.wide = make([]float32, e.N)
	}
	v := l.wide[:e.N]
	if e.DType != scaledDType {
		return v, safetensors.Decode(v, b, e.DType)
	}
	dequantize := l.how.Dequantize
	if e.State == ModelState {
		dequantize = func(_ string, dst []float32, codes []byte, scale float32) error {
			dequantizeModel(dst, codes, scale)
			return nil
		}
	}
	if dequantize == nil {
		return nil, fmt.Errorf("%s of %q is in 8 bits", e.State, e.Tensor)
	}
	scales, err := l.scalesOf(e.State, e.Tensor, e.Start/QuantBlock, (e.N+QuantBlock-1)/QuantBlock)
	if err != nil {
		return nil, err
	}
	for i, scale := range scales {
		lo, hi := i*QuantBlock, min((i+1)*QuantBlock, len(v))
		if err := dequantize(e.State, v[lo:hi], b[lo:hi], scale); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// give adds an extent's values to the want's chunk. The chunk goes to the sink when it is full
// or the want ends.
func (l *loader) give(w *Want, e *located, v []float32) error {
	end := min(w.Start+w.N, e.Start+e.N)
	for at := max(w.Start, e.Start); at < end; {
		if whole := min(ChunkElems, w.Start+w.N-at); l.have == 0 && end-at >= whole {
			if err := l.how.Sink(w.State, w.Tensor, at, v[at-e.Start:][:whole]); err != nil {
				return err
			}
			at += whole
			continue
		}
		if l.chunk == nil {
			l.chunk = make([]float32, ChunkElems)
		}
		k := copy(l.chunk[l.have:], v[at-e.Start:end-e.Start])
		at += int64(k)
		if l.have += k; l.have < len(l.chunk) && at < w.Start+w.N {
			continue
		}
		if err := l.how.Sink(w.State, w.Tensor, at-int64(l.have), l.chunk[:l.have]); err != nil {
			return err
		}
		l.have = 0
	}
	return nil
}
