package store

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/internal/filesys"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// File is one rank's file. It implements device.Disk.
//
// Transfers that run at the same time must not overlap in bytes if one of them writes, but they
// may share a granule, since buffers lie side by side. A transfer therefore locks the granules
// that it covers only in part. The other granules belong to it alone.
type File struct {
	folder   *Folder
	queue    *queue
	name     string
	file     filesys.File
	raw      RawFile
	size     int64 // bytes of the arena
	physical int64 // bytes of the file: size rounded up to a page
	block    int64
	granule  int64
	memAlign uintptr // alignment of memory for direct I/O; 1: none is needed
	initial  byte

	sums    []uint32 // by granule: CRC32C of the stored bytes
	written []uint32 // one bit a granule: it has been written
	lengths []uint32 // with a codec, by granule: number of stored bytes
	locks   [64]sync.Mutex
	cache   *cache

	read_, wrote atomic.Int64

	mu     sync.Mutex // guards the fields below
	closed bool
	users  int // requests that are using the file
}

var _ device.Disk = (*File)(nil)

func (f *Folder) newFile(rank int, size int64, initial byte, cache int64) (*File, error) {
	opened, err := openFile(f.f, rank, f.opts)
	if err != nil {
		return nil, err
	}
	file := &File{
		folder: f, name: opened.name, file: opened.file, raw: opened.file, size: size, physical: roundUp(size, Page), block: int64(f.opts.Block),
		granule: Page, memAlign: uintptr(opened.memAlign), initial: initial,
	}
	if f.opts.Codec != None {
		file.granule = file.block
	}
	if err := opened.file.Allocate(file.physical); err != nil {
		err = fmt.Errorf("%w%s", cause(err), freeText(opened.file))
		return nil, errors.Join(&Error{Op: "preallocate", File: file.name, Off: 0, Len: file.physical, Err: err}, opened.file.Close())
	}
	if opened.direct {
		if why := probeDirect(opened.file, opened.memAlign); why != "" {
			opened.why = why
			if err := filesys.ThroughCache(opened.file); err != nil {
				return nil, errors.Join(&Error{Op: "open", File: file.name, Len: -1, Err: err}, opened.file.Close())
			}
			file.memAlign = 1
		}
	}
	if opened.why != "" {
		f.warn(fmt.Sprintf("disk tier: %s: no direct I/O (%s); reads and writes go through the page cache, which takes memory beyond the plan", f.dir, opened.why))
	}
	granules := (file.physical + file.granule - 1) / file.granule
	file.sums = make([]uint32, granules)
	file.written = make([]uint32, (granules+31)/32)
	if f.opts.Codec != None {
		file.lengths = make([]uint32, granules)
	}
	if f.opts.Wrap != nil {
		file.raw = f.opts.Wrap(rank, file.raw)
	}
	if cache > 0 {
		if file.cache, err = newCache(cache, file.block, file.physical); err != nil {
			return nil, errors.Join(&Error{Op: "map the cache of", File: file.name, Len: -1, Err: err}, file.shut())
		}
	}
	return file, nil
}

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

// Load binds a read: see device.Disk.
func (f *File) Load(mem []byte, off int64) device.Transfer {
	return f.bind(load, mem, off, int64(len(mem)), 0)
}

// Store binds a write: see device.Disk.
func (f *File) Store(mem []byte, off int64) device.Transfer {
	return f.bind(save, mem, off, int64(len(mem)), 0)
}

// Fill binds a write of one value: see device.Disk.
func (f *File) Fill(off, n int64, b byte) device.Transfer { return f.bind(fill, nil, off, n, b) }

// Traffic returns the bytes moved so far.
func (f *File) Traffic() device.Traffic {
	return device.Traffic{Read: f.read_.Load(), Written: f.wrote.Load()}
}

// Name returns the name of the file for errors.
func (f *File) Name() string { return f.name }

// Close frees the space on disk. If requests are still running, which the system may never end,
// the last of them frees it.
func (f *File) Close() error {
	f.mu.Lock()
	was := f.closed
	f.closed = true
	free := f.users == 0
	f.mu.Unlock()
	if was || !free {
		return nil
	}
	return f.shut()
}

// enter registers a request as a user of the file; false if the file is closed.
func (f *File) enter() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return false
	}
	f.users++
	return true
}

// leave undoes enter. The last user of a closed file frees it.
func (f *File) leave() {
	f.mu.Lock()
	f.users--
	last := f.closed && f.users == 0
	f.mu.Unlock()
	if last {
		_ = f.shut() // no caller is left to receive the error
	}
}

func (f *File) errClosed(off, n int64) error {
	return &Error{Op: "use", File: f.name, Off: off, Len: n, Err: os.ErrClosed}
}

func (f *File) shut() error {
	err := f.file.Close()
	if err != nil {
		err = &Error{Op: "close", File: f.name, Len: -1, Err: cause(err)}
	}
	if f.cache != nil {
		err = errors.Join(err, f.cache.close())
	}
	f.sums, f.written, f.lengths = nil, nil, nil
	return err
}

func (f *File) check(off, n int64) error {
	f.mu.Lock()
	closed := f.closed
	f.mu.Unlock()
	switch {
	case closed:
		return f.errClosed(off, n)
	case off < 0 || n < 0 || off > f.size-n:
		return &Error{Op: "reach", File: f.name, Off: off, Len: n, Err: fmt.Errorf("the arena has %d bytes", f.size)}
	}
	return nil
}

// span is a range of bytes extended to whole granules.
type span struct {
	lo, hi     int64
	head, tail bool // the first or last granule is covered only in part
}

func (f *File) span(off, n int64) span {
	s := span{lo: off / f.granule * f.granule, hi: min(roundUp(off+n, f.granule), f.physical)}
	s.head = off != s.lo
	s.tail = off+n != s.hi && off+n != f.size
	return s
}

// lock locks the granules that s covers only in part. All callers lock in the same order, so that
// they cannot deadlock.
func (f *File) lock(s span) (a, b int) {
	a, b = -1, -1
	n := int64(len(f.locks))
	if s.head {
		a = int(s.lo / f.granule % n)
	}
	if s.tail {
		b = int((s.hi - 1) / f.granule % n)
	}
	if a == b {
		b = -1
	}
	if b >= 0 && b < a {
		a, b = b, a
	}
	for _, i := range [2]int{a, b} {
		if i >= 0 {
			f.locks[i].Lock()
		}
	}
	return a, b
}

func (f *File) unlock(a, b int) {
	for _, i := range [2]int{a, b} {
		if i >= 0 {
			f.locks[i].Unlock()
		}
	}
}

// direct says whether mem is aligned for direct I/O, so that no copy is needed.
func (f *File) direct(mem []byte) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(mem)))%f.memAlign == 0
}

// read fills mem from offset off. Both must be within one block.
func (f *File) read(w *worker, mem []byte, off int64) error {
	n := int64(len(mem))
	s := f.span(off, n)
	a, b := f.lock(s)
	defer f.unlock(a, b)
	key, version := off/f.block, uint32(0)
	if f.cache != nil {
		version = f.cache.version(key)
		if f.cache.get(key, version, s, mem, off, f.verify) {
			return nil
		}
	}
	buf := mem
	if s.hi-s.lo != n || !f.direct(mem) {
		buf = w.buf[:s.hi-s.lo]
	}
	moved, err := f.load(w, buf, s.lo)
	if err != nil {
		return err
	}
	if f.cache != nil {
		f.cache.keep(key, version, version, s, buf)
	}
	if int64(len(buf)) != n || &buf[0] != &mem[0] {
		copy(mem, buf[off-s.lo:])
	}
	if moved {
		f.read_.Add(n)
	}
	return nil
}

// write stores mem, or n bytes of value if mem is nil, at off. The range must be within one block.
func (f *File) write(w *worker, mem []byte, off, n int64, value byte) error {
	s := f.span(off, n)
	a, b := f.lock(s)
	defer f.unlock(a, b)
	buf := mem
	if mem == nil || s.hi-s.lo != n || !f.direct(mem) {
		buf = w.buf[:s.hi-s.lo]
		last := (s.hi - 1) / f.granule * f.granule
		if s.head {
			if _, err := f.load(w, buf[:min(f.granule, s.hi-s.lo)], s.lo); err != nil {
				return err
			}
		}
		if s.tail && !(s.head && last == s.lo) {
			if _, err := f.load(w, buf[last-s.lo:], last); err != nil {
				return err
			}
		}
		if inner := buf[off-s.lo:][:n]; mem != nil {
			copy(inner, mem)
		} else {
			fillBytes(inner, value)
		}
		if off+n == f.size {
			fillBytes(buf[off+n-s.lo:], 0)
		}
	}
	key, version := off/f.block, uint32(0)
	if f.cache != nil {
		version = f.cache.bump(key)
	}
	if err := f.save(w, buf, s.lo); err != nil {
		return err
	}
	if f.cache != nil {
		f.cache.keep(key, version-1, version, s, buf) // bytes of the block outside s have not changed
	}
	f.wrote.Add(n)
	return nil
}

func fillBytes(b []byte, value byte) {
	for i := range b {
		b[i] = value
	}
}

func (f *File) isWritten(g int64) bool {
	return atomic.LoadUint32(&f.written[g/32])&(1<<(g%32)) != 0
}

// load reads the whole granules of buf, which start at lo, and verifies them. It returns whether
// it had to read the file.
func (f *File) load(w *worker, buf []byte, lo int64) (bool, error) {
	first, last := lo/f.granule, (lo+int64(len(buf))-1)/f.granule
	any := false
	for g := first; g <= last && !any; g++ {
		any = f.isWritten(g)
	}
	if !any {
		fillBytes(buf, f.initial)
		return false, nil
	}
	if f.lengths != nil {
		return true, f.loadPacked(w, buf, first)
	}
	if err := f.readRaw(buf, lo); err != nil {
		return true, err
	}
	for g := first; g <= last; g++ {
		if at := (g - first) * Page; !f.isWritten(g) {
			fillBytes(buf[at:at+Page], f.initial)
		}
	}
	return true, f.verify(buf, lo)
}

// verify compares the checksums of the written granules of buf, which start at lo, with the ones
// computed when they were written.
func (f *File) verify(buf []byte, lo int64) error {
	for at := int64(0); at < int64(len(buf)); at += f.granule {
		g := (lo + at) / f.granule
		if f.lengths != nil || !f.isWritten(g) {
			continue
		}
		part := buf[at:min(at+f.granule, int64(len(buf)))]
		if got := crc32.Checksum(part, castagnoli); got != f.sums[g] {
			return &Error{Op: "read", File: f.name, Off: lo + at, Len: int64(len(part)), Err: &Corrupt{Want: f.sums[g], Got: got}}
		}
	}
	return nil
}

// save writes buf, which has whole granules, to offset lo of the file.
func (f *File) save(w *worker, buf []byte, lo int64) error {
	first, last := lo/f.granule, (lo+int64(len(buf))-1)/f.granule
	if f.lengths != nil {
		if err := f.savePacked(w, buf, first); err != nil {
			return err
		}
	} else {
		for g := first; g <= last; g++ {
			at := (g - first) * Page
			f.sums[g] = crc32.Checksum(buf[at:at+Page], castagnoli)
		}
		if err := f.writeRaw(buf, lo); err != nil {
			return err
		}
	}
	for g := first; g <= last; g++ {
		atomic.OrUint32(&f.written[g/32], 1<<(g%32))
	}
	return nil
}

func (f *File) readRaw(buf []byte, off int64) error {
	n, err := f.raw.ReadAt(buf, off)
	if n == len(buf) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return &Error{Op: "read", File: f.name, Off: off, Len: int64(len(buf)), Err: cause(err)}
}

func (f *File) writeRaw(buf []byte, off int64) error {
	n, err := f.raw.WriteAt(buf, off)
	if err == nil && n != len(buf) {
		err = io.ErrShortWrite
	}
	if err != nil {
		return &Error{Op: "write", File: f.name, Off: off, Len: int64(len(buf)), Err: cause(err)}
	}
	return nil
}
