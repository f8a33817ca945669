// Package store is the disk tier: one preallocated file a rank, read and
// written with direct I/O by a queue of workers, every block's checksum kept in
// memory when it is written and verified whenever it is read.
//
//	transfer   [off, off+n) of a rank's arena ⇄ memory
//	piece      its part of one block of the file (Options.Block, 1 MiB): one
//	           request, worked on by one of Options.Depth workers
//	granule    4096 bytes (a whole block with a codec): what a checksum covers and
//	           the least that is read or written; where a transfer starts or ends
//	           inside one, that granule is read, changed and written
//
// The file has no name, so that nothing is left of a process that dies: see
// openFile. The package is mechanism only: what lives on disk, and when it
// moves, is decided by the rewrites of package offload.
package store

import (
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

// Page is what offsets and lengths of direct I/O are multiples of, in bytes.
const Page = 4096

// Defaults of Options where doctor has measured nothing.
const (
	DefaultBlock = 1 << 20
	DefaultDepth = 16
)

// Limits of Options.
const (
	maxBlock = 64 << 20
	maxDepth = 1024
)

// RawFile is what the store does I/O on.
type RawFile interface {
	io.ReaderAt
	io.WriterAt
}

// Options of a Folder. The zero value takes what doctor measured for the
// folder's filesystem, or else the defaults.
type Options struct {
	// Block is the largest request in bytes, a power of two from 4096 up to
	// 64 MiB. Larger ones need fewer requests, and Depth · Block bytes of memory.
	Block int
	// Depth is how many requests the ranks of the process have in flight together.
	Depth int
	// Buffered goes through the page cache, which takes memory outside the plan.
	Buffered bool
	// Codec compresses blocks. The file is as large as without.
	Codec Codec
	// Cache is memory in bytes that each rank's file may use to hold blocks that
	// it would otherwise read.
	Cache int64
	// Warn is told what a person should know, one line a call; nil drops it.
	Warn func(string)
	// Wrap puts something between the store and a rank's file: injected faults.
	Wrap func(rank int, f RawFile) RawFile

	// Folders opens the folder; nil: filesys.System.
	Folders filesys.Opener

	grace time.Duration // how long Close waits for requests; 0: closeGrace

	named bool // make files with a name even where the filesystem can do without
}

// Folder is a process's use of the disk tier's folder. Create and Close are for
// one goroutine at a time, transfers of its files for any.
type Folder struct {
	f     filesys.Folder
	dir   string // its path, for messages
	opts  Options
	made  filesys.Made // folders that Open made
	lock  filesys.File
	files []*File
	queue *queue
	once  map[string]bool // warnings given
	mu    sync.Mutex      // guards once
}

// Open makes the folder if it is missing, removes what a process that died
// before it could take its file's name away has left there, and reserves
// nothing yet. Its error is an *Error, or another one where the path or an
// option is no sensible input.
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
		if try == 10 { // another job removed it under our hands, again and again
			return nil, &Error{Op: "open", File: abs, Len: -1, Err: errors.New("the folder vanishes while it is opened")}
		}
	}
	if err := f.settle(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	removeStale(f.f)
	return f, nil
}

// drop gives back a folder that is not locked.
func (f *Folder) drop() error {
	f.made.Remove()
	f.made = nil
	return f.f.Close()
}

// settle fills in the options that were not given.
func (f *Folder) settle() error {
	o := &f.opts
	if o.Block == 0 {
		o.Block = DefaultBlock
	}
	if o.Depth == 0 {
		o.Depth = DefaultDepth
	}
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

// makeFolder opens the folder, and makes what is missing on the way to it.
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

// badFolder is the error of a folder that can't be had: an *Error where the
// machine is at fault (a disk that is full, read-only or broken), another one
// where the path can't be such a folder.
func badFolder(op, path string, err error) error {
	e := &Error{Op: op, File: path, Len: -1, Err: cause(err)}
	for _, fault := range []error{syscall.EROFS, syscall.ENOSPC, syscall.EIO} {
		if errors.Is(err, fault) {
			return e
		}
	}
	return errors.New(e.Error())
}

// Block and Depth return what the store works with.
func (f *Folder) Block() int { return f.opts.Block }

// Depth returns the number of requests in flight.
func (f *Folder) Depth() int { return f.opts.Depth }

// warn tells each text once.
func (f *Folder) warn(text string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.opts.Warn == nil || f.once[text] {
		return
	}
	f.once[text] = true
	f.opts.Warn(text)
}

// Create makes the file of a rank and reserves its bytes on the disk, rounded
// up to a page. What was never written reads as bytes of value initial.
func (f *Folder) Create(rank int, bytes int64, initial byte) (device.Disk, error) {
	return f.create(rank, bytes, initial, f.opts.Cache)
}

// CreateUncached is Create for contents that are not read in a circle: no block
// of them is pinned in memory.
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
		f.queue, err = newQueue(f.opts)
		if err != nil {
			return nil, errors.Join(err, file.shut())
		}
	}
	file.queue = f.queue
	f.files = append(f.files, file)
	return file, nil
}

// Close closes files that are still open, and removes the folder if Open made
// it and nobody else uses it.
func (f *Folder) Close() error {
	var errs []error
	if f.queue != nil { // first: nothing is taken away from a worker
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

// OutsideBytes is the memory that a process's use of the store takes outside
// the arenas: the workers' buffers and the checksums of files of these sizes.
// Caches, as given, come on top.
func OutsideBytes(o Options, files ...int64) int64 {
	block, depth := int64(o.Block), int64(o.Depth)
	if block == 0 {
		block = DefaultBlock
	}
	if depth == 0 {
		depth = DefaultDepth
	}
	total := depth * block * int64(o.Codec.buffers())
	for _, size := range files {
		granules := (size + Page - 1) / Page
		if o.Codec != None {
			granules = (size + block - 1) / block * 2 // checksum and length
		}
		total += granules*4 + granules/8
	}
	return total
}
