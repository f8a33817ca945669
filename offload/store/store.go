// Package store is the disk tier: one preallocated file a rank, read and written with direct I/O
// by a queue of workers. The checksum of every block is kept in memory when the block is written,
// and verified whenever it is read.
//
//	transfer   bytes [off, off+n) of a rank's arena ⇄ memory
//	piece      the part of a transfer in one block of the file (Options.Block, 1 MiB): one
//	           request, handled by one of Options.Depth workers
//	granule    4096 bytes (a whole block with a codec): the unit of checksums, and the least that
//	           is read or written. If a transfer starts or ends inside a granule, that granule is
//	           read, changed and written
//
// The file has no name, so that the kernel frees it when the process dies: see openFile. The
// package only moves bytes: the rewrites of package offload decide what is on disk, and when it
// moves.
package store

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/internal/filesys"
)

// Page is the alignment in bytes of offsets and lengths for direct I/O.
const Page = 4096

// Defaults of Options if `spillway doctor` has not measured the disk.
const (
	DefaultBlock = 1 << 20
	DefaultDepth = 16
)

// Limits of Options.
const (
	maxBlock = 64 << 20
	maxDepth = 1024
)

// RawFile is the file on which the store does its I/O.
type RawFile interface {
	io.ReaderAt
	io.WriterAt
}

// Options of a Folder. Zero fields are taken from what `spillway doctor` measured for the folder's
// filesystem, or else from the defaults.
type Options struct {
	// Block is the largest request in bytes, a power of two from 4096 up to
	// 64 MiB. Larger ones need fewer requests, and Depth · Block bytes of memory.
	Block int
	// Depth is the number of requests that all ranks of the process together have in flight.
	Depth int
	// Buffered uses the page cache, whose memory is outside the plan.
	Buffered bool
	// Codec compresses blocks. It does not change the size of the file.
	Codec Codec
	// Cache is the memory in bytes that each rank's file may use to cache blocks.
	Cache int64
	// Warn is called with warnings for the user, of one line each; nil drops them.
	Warn func(string)
	// Wrap, if set, wraps each rank's file, for example to inject faults.
	Wrap func(rank int, f RawFile) RawFile

	// Folders opens the folder; nil: filesys.System.
	Folders filesys.Opener

	grace time.Duration // how long Close waits for requests; 0: closeGrace

	named bool // create files with a name even if the filesystem supports O_TMPFILE
}

// Folder is a process's use of the disk tier's folder. Create and Close must be called from one
// goroutine at a time; transfers of its files may be called from any.
type Folder struct {
	f     filesys.Folder
	dir   string // its path, for messages
	opts  Options
	made  filesys.Made // folders that Open created
	lock  filesys.File
	files []*File
	queue *queue
	once  map[string]bool // warnings that were given
	mu    sync.Mutex      // guards once
}

// Open creates the folder if it is missing, and removes named files that dead processes have left
// in it. It reserves no space. Its error is an *Error if the machine is at fault, and another one
// if the path or an option is invalid.
func Open(dir string, o Options) (*Folder, error) {
	if dir == "" {
		return nil, errors.New("disk tier: no folder is given")
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("disk tier: %s: %w", dir, err)
	}
	f := &Folder{dir: abs, opts: o, once: map[string]bool{}}
	if f.opts.Folders == nil {
		f.opts.Folders = filesys.System
	}
	for try := 0; ; try++ {
		if err := f.makeFolder(); err != nil {
			return nil, err
		}
		ok, err := f.lockFolder()
		if err != nil {
			return nil, errors.Join(err, f.drop())
		}
		if ok {
			break
		}
		if err := f.drop(); err != nil {
			return nil, err
		}
		if try == 10 { // another job removed it between our calls, ten times
			return nil, &Error{Op: "open", File: abs, Len: -1, Err: errors.New("the folder vanishes while it is opened")}
		}
	}
	if err := f.settle(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	removeStale(f.f)
	return f, nil
}

// drop closes a folder that is not locked, and removes it if Open created it.
func (f *Folder) drop() error {
	f.made.Remove()
	f.made = nil
	return f.f.Close()
}

// settle fills in options that were not given, and checks the others.
func (f *Folder) settle() error {
	o := &f.opts
	o.Block, o.Depth = cmp.Or(o.Block, DefaultBlock), cmp.Or(o.Depth, DefaultDepth)
	switch {
	case o.Block < Page || o.Block > maxBlock || o.Block&(o.Block-1) != 0:
		return fmt.Errorf("disk tier: block of %d bytes, want a power of two from %d to %d", o.Block, Page, maxBlock)
	case o.Depth < 1 || o.Depth > maxDepth:
		return fmt.Errorf("disk tier: queue depth %d, want 1 to %d", o.Depth, maxDepth)
	case o.Cache < 0:
		return fmt.Errorf("disk tier: a cache of %d bytes", o.Cache)
	case o.Codec >= numCodecs:
		return fmt.Errorf("disk tier: codec %d is not known", o.Codec)
	}
	return nil
}

// makeFolder opens the folder, and creates it and missing parents.
func (f *Folder) makeFolder() (err error) {
	f.f, f.made, err = filesys.MakeFolder(f.opts.Folders, f.dir)
	if errors.Is(err, syscall.ENOTDIR) {
		return fmt.Errorf("disk tier: %s is not a folder", f.dir)
	}
	if err != nil {
		return badFolder("open folder", f.dir, err)
	}
	return nil
}

// badFolder returns the error for a folder that cannot be used: an *Error if the machine is at
// fault (the disk is full or broken), and another one if the path is unsuitable.
func badFolder(op, path string, err error) error {
	e := &Error{Op: op, File: path, Len: -1, Err: cause(err)}
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EIO) {
		return e
	}
	return errors.New(e.Error())
}

// Block returns the largest request in bytes that the store uses.
func (f *Folder) Block() int { return f.opts.Block }

// Depth returns the number of requests in flight.
func (f *Folder) Depth() int { return f.opts.Depth }

// warn gives each warning only once.
func (f *Folder) warn(text string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.opts.Warn == nil || f.once[text] {
		return
	}
	f.once[text] = true
	f.opts.Warn(text)
}

// Create creates the file of a rank and reserves its bytes on the disk, rounded up to a page.
// Bytes that were never written read as initial.
func (f *Folder) Create(rank int, bytes int64, initial byte) (device.Disk, error) {
	return f.create(rank, bytes, initial, f.opts.Cache)
}

// CreateUncached is Create without a cache, for contents that are not read in a circle.
func (f *Folder) CreateUncached(rank int, bytes int64, initial byte) (device.Disk, error) {
	return f.create(rank, bytes, initial, 0)
}

func (f *Folder) create(rank int, bytes int64, initial byte, cache int64) (*File, error) {
	if bytes <= 0 {
		return nil, fmt.Errorf("disk tier: a file of %d bytes, want a positive size", bytes)
	}
	if bytes > 1<<62 {
		return nil, fmt.Errorf("disk tier: a file of %d bytes is more than a file can have", bytes)
	}
	file, err := f.newFile(rank, bytes, initial, cache)
	if err != nil {
		return nil, err
	}
	if f.queue == nil {
		if f.queue, err = newQueue(f.opts); err != nil {
			return nil, errors.Join(err, file.shut())
		}
	}
	file.queue = f.queue
	f.files = append(f.files, file)
	return file, nil
}

// Close closes files that are still open, and removes the folder if Open created it and no other
// job uses it.
func (f *Folder) Close() error {
	var errs []error
	if f.queue != nil { // first, so that no worker uses what is closed below
		errs = append(errs, f.queue.close())
		f.queue = nil
	}
	for _, file := range f.files {
		errs = append(errs, file.Close())
	}
	f.files = nil
	if f.lock != nil {
		if len(f.made) > 0 && f.alone() {
			f.made.Remove()
		} else {
			f.made.Stay()
		}
		f.made = nil
		errs = append(errs, f.lock.Close(), f.f.Close())
		f.lock = nil
	}
	return errors.Join(errs...)
}

// OutsideBytes returns the memory outside the arenas that the store takes in a process whose files
// have the given sizes: the workers' buffers and the checksums, without Options.Cache.
func OutsideBytes(o Options, files ...int64) int64 {
	block, depth := int64(cmp.Or(o.Block, DefaultBlock)), int64(cmp.Or(o.Depth, DefaultDepth))
	total := depth * block * int64(o.Codec.buffers())
	for _, size := range files {
		granules := (size + Page - 1) / Page
		if o.Codec != None {
			granules = (size + block - 1) / block * 2 // a checksum and a length each
		}
		total += granules*4 + granules/8
	}
	return total
}
