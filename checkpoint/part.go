package checkpoint

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/safetensors"
)

// A rank's file is a safetensors file whose tensors are extents. Its header, padded to
// alignment, carries the CRC-32C of each extent in the order of their bytes. It is written
// last, into the room that was left for it.

const (
	// imageBytes is the write size of a part that is whole in memory. Each request costs about
	// the same CPU time whatever its size.
	imageBytes = 4 << 20
	// lookBytes is how much is checksummed and then checked for finite values at a time: it
	// stays in the L1 cache between the two.
	lookBytes = 32 << 10
)

// Part is the part of a checkpoint that one rank writes: its extents, ordered by element size,
// largest first.
type Part struct {
	Index, Of int // the rank, and how many there are
	Extents   []Extent
	Buffer    int64 // bytes of memory that WritePart may use, at least LeastBuffer; 0: BufferBytes
	// Read fills dst with bytes of the i-th extent from byte off on. Extents are read in order,
	// from one goroutine.
	Read func(i int, off int64, dst []byte) error
}

func (p *Part) fileName() string {
	return fmt.Sprintf("rank-%05d-of-%05d.safetensors", p.Index, p.Of)
}

// partName matches the names of ranks' files.
var partName = regexp.MustCompile(`^rank-[0-9]{5,}-of-[0-9]{5,}\.safetensors$`)

// Bytes returns the size of the part's extents, without the header.
func (p *Part) Bytes() (n int64) {
	for i := range p.Extents {
		n += p.Extents[i].Bytes()
	}
	return n
}

// LeastBuffer is the smallest write buffer for a part, in bytes.
const LeastBuffer = filesys.Depth * 4 * filesys.Alignment

// BufferBytes returns the best size of a write buffer for a part of n bytes.
func BufferBytes(n int64) int64 { return min(filesys.Depth*filesys.BlockBytes, filesys.RoundUp(n)) }

// StagingBytes returns the memory that holds a complete part of n bytes.
func StagingBytes(n int64) int64 { return filesys.RoundUp(n) }

// partFile is a part that is being written. Positions count bytes of the data, after the
// header.
type partFile struct {
	part   *Part
	layout safetensors.Layout
	header []byte
	sums   []uint32
	filled int // the extent at which fill continues
	seen   int // the extent at which look continues
	odd    NonFinite
}

func newPartFile(p *Part) (*partFile, error) {
	if !littleEndian {
		return nil, errors.New("checkpoint files are little-endian, and this machine is big-endian; save on a little-endian machine")
	}
	tensors := make([]safetensors.Tensor, len(p.Extents))
	for i, e := range p.Extents {
		tensors[i] = e.tensor()
		if i > 0 && p.Extents[i-1].DType.Size() < e.DType.Size() {
			return nil, fmt.Errorf("extent %.80q has wider elements than the one before it", tensors[i].Name)
		}
		if read, err := extentOf(tensors[i]); err != nil || read != e {
			return nil, cmp.Or(err, fmt.Errorf("extent %.80q can't be told from another: its state has a colon", tensors[i].Name))
		}
	}
	metadata := map[string]string{"format": "pt", sumsKey: strings.Repeat("00000000", len(tensors))}
	w := &partFile{part: p, sums: make([]uint32, len(tensors))}
	var err error
	w.layout, w.header, err = safetensors.NewLayout(tensors, metadata, filesys.Alignment)
	return w, err
}

func (w *partFile) data() int64 { return w.layout.Size - w.layout.Data }

// begin returns the position of the i-th extent's first byte, or the end of the data if i is the
// number of extents.
func (w *partFile) begin(i int) int64 {
	if i == len(w.layout.Begin) {
		return w.data()
	}
	return w.layout.Begin[i] - w.layout.Data
}

// each calls visit with the extents that overlap [lo, lo+len(b)), from the i-th on, and their
// part of b. It returns the extent at which the next range continues.
func (w *partFile) each(i int, lo int64, b []byte, visit func(i int, off int64, b []byte) error) (int, error) {
	for at := int64(0); at < int64(len(b)); {
		off := lo + at - w.begin(i)
		n := min(w.begin(i+1)-lo-at, int64(len(b))-at)
		if err := visit(i, off, b[at:at+n]); err != nil {
			return i, err
		}
		if at += n; lo+at == w.begin(i+1) {
			i++
		}
	}
	return i, nil
}

// fill reads the data from position lo on into b. Calls must have ascending ranges.
func (w *partFile) fill(lo int64, b []byte) (err error) {
	w.filled, err = w.each(w.filled, lo, b, w.part.Read)
	return err
}

// look adds the bytes from lo on to the checksums and checks that their values are finite.
// Calls must have ascending ranges.
func (w *partFile) look(lo int64, b []byte) (err error) {
	w.seen, err = w.each(w.seen, lo, b, func(i int, off int64, b []byte) error {
		e := &w.part.Extents[i]
		if w.odd.Count > 0 && (w.odd.State != e.State || w.odd.Tensor != e.Tensor) {
			return &w.odd
		}
		for len(b) > 0 {
			n := min(len(b), lookBytes)
			w.sums[i] = crc32.Update(w.sums[i], castagnoli, b[:n])
			w.odd.lookAt(e, off, b[:n])
			off, b = off+int64(n), b[n:]
		}
		return nil
	})
	return err
}

// end returns the file's header after look has seen all data.
func (w *partFile) end() (File, error) {
	if w.odd.Count > 0 {
		return File{}, &w.odd
	}
	text := make([]byte, 0, 8*len(w.sums))
	for _, s := range w.sums {
		text = hex.AppendEncode(text, []byte{byte(s >> 24), byte(s >> 16), byte(s >> 8), byte(s)})
	}
	key := []byte(`"` + sumsKey + `":"`)
	copy(w.header[bytes.Index(w.header, key)+len(key):], text)
	return File{Name: w.part.fileName(), Bytes: w.layout.Size, CRC32C: sum(w.header), Header: w.layout.Data}, nil
}

// WritePart writes a rank's file into a checkpoint's folder and syncs it, through Part.Buffer
// bytes of memory. Non-finite values are a *NonFinite error. After an error the file may
// remain; it is removed with the folder.
func WritePart(ctx context.Context, in filesys.Folder, p *Part) (File, error) {
	f, err := writePart(ctx, in, p)
	return f, partError(in, p, err)
}

func partError(in filesys.Folder, p *Part, err error) error {
	if err == nil {
		return nil
	}
	path := filepath.Join(in.Path(), p.fileName())
	if named, ok := errors.AsType[*fs.PathError](err); ok && named.Path == path { // the error names the operation and the file
		return err
	}
	return fmt.Errorf("write %s: %w", path, err)
}

func writePart(ctx context.Context, in filesys.Folder, p *Part) (File, error) {
	w, err := newPartFile(p)
	if err != nil {
		return File{}, err
	}
	room := BufferBytes(w.data())
	if p.Buffer > 0 {
		room = min(room, max(p.Buffer/filesys.Alignment*filesys.Alignment, LeastBuffer))
	}
	memory, err := filesys.MapPages(room)
	if err != nil {
		return File{}, err
	}
	o, err := filesys.CreateBlocks(in, p.fileName(), w.layout.Size)
	if err != nil {
		return File{}, errors.Join(err, filesys.UnmapPages(memory))
	}
	each := int(max(filesys.RoundUp((room+filesys.Depth-1)/filesys.Depth), filesys.Alignment))
	free := make(chan []byte, filesys.Depth)
	for rest := memory; len(rest) > 0; {
		n := min(each, len(rest))
		free <- rest[:n:n]
		rest = rest[n:]
	}
	f, err := w.finish(o, w.stream(ctx, o, free))
	return f, errors.Join(err, filesys.UnmapPages(memory))
}

// finish ends the part's file after all blocks were queued, or an error.
func (w *partFile) finish(o *filesys.Blocks, err error) (f File, _ error) {
	err = errors.Join(err, o.Wait())
	if err == nil {
		f, err = w.end()
	}
	return f, o.Finish(w.header, err)
}

// stream fills buffers and queues them for the file's writers, which return them to free.
func (w *partFile) stream(ctx context.Context, o *filesys.Blocks, free chan []byte) error {
	for lo := int64(0); lo < w.data(); {
		if err := cmp.Or(ctx.Err(), o.Failed()); err != nil {
			return err
		}
		b := <-free
		n := min(int64(len(b)), w.data()-lo)
		err := w.fill(lo, b[:n])
		if err == nil {
			err = w.look(lo, b[:n])
		}
		if err != nil {
			free <- b
			return err
		}
		clear(b[n:min(filesys.RoundUp(n), int64(len(b)))])
		o.Put(filesys.Block{At: w.layout.Data + lo, B: b, N: n, Free: free})
		lo += n
	}
	return nil
}

// Image is a copy of a whole part in memory. It is written to the file while training changes
// the states.
type Image struct {
	w      *partFile
	memory []byte
}

// Stage copies a part's states into the image. The first call allocates the memory; later calls
// reuse it.
func (m *Image) Stage(p *Part) (err error) {
	m.w = nil
	w, err := newPartFile(p)
	if err != nil {
		return err
	}
	if need := StagingBytes(w.data()); int64(len(m.memory)) != need {
		if err := m.Close(); err != nil {
			return err
		}
		if m.memory, err = filesys.MapPages(need); err != nil {
			return err
		}
	}
	for lo := int64(0); lo < w.data(); {
		n := min(filesys.BlockBytes, w.data()-lo)
		if err := w.fill(lo, m.memory[lo:lo+n]); err != nil {
			return err
		}
		lo += n
	}
	m.w = w
	return nil
}

// Write is WritePart of the part that was staged last. Do not call Stage while it runs.
func (m *Image) Write(ctx context.Context, in filesys.Folder) (File, error) {
	w := m.w
	if w == nil {
		return File{}, errors.New("write a checkpoint's part: nothing is staged")
	}
	m.w = nil
	f, err := m.write(ctx, in, w)
	return f, partError(in, w.part, err)
}

func (m *Image) write(ctx context.Context, in filesys.Folder, w *partFile) (f File, err error) {
	o, err := filesys.CreateBlocks(in, w.part.fileName(), w.layout.Size)
	if err != nil {
		return File{}, err
	}
	for lo := int64(0); lo < w.data() && err == nil; {
		n := min(imageBytes, w.data()-lo)
		b := m.memory[lo:min(lo+imageBytes, int64(len(m.memory)))]
		if err = cmp.Or(ctx.Err(), o.Failed()); err == nil {
			err = w.look(lo, b[:n])
		}
		if err == nil {
			o.Put(filesys.Block{At: w.layout.Data + lo, B: b, N: n})
		}
		lo += n
	}
	return w.finish(o, err)
}

// Close releases the memory. No Write may be running.
func (m *Image) Close() error {
	memory := m.memory
	m.memory, m.w = nil, nil
	return filesys.UnmapPages(memory)
}
