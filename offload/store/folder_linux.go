package store

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// opened is a rank's new file.
type opened struct {
	file     filesys.File
	name     string // for errors
	direct   bool
	memAlign int    // of memory in direct I/O
	why      string // there is no direct I/O; empty: there is, or it isn't wanted
}

// openFile makes a rank's file without a name (O_TMPFILE), so that two jobs in
// one folder do not meet and the kernel gives the space back when the process
// ends, however it ends. Filesystems that can't do so get a file whose name is
// taken away at once; its lock, held in between, tells removeStale that its
// owner lives.
func openFile(in filesys.Folder, rank int, o Options) (opened, error) {
	got := opened{name: filepath.Join(in.Path(), fmt.Sprintf("spillway-%d-rank%d", os.Getpid(), rank)) + " (unnamed)", memAlign: 1}
	flags := []int{unix.O_DIRECT, 0}
	if o.Buffered {
		flags = flags[1:]
	}
	var err error
	for i, extra := range flags {
		if o.named {
			got.file, err = openNamed(in, rank, extra)
		} else {
			got.file, err = in.OpenFile(".", os.O_RDWR|unix.O_TMPFILE|extra, 0o600)
			if isAny(err, unix.EOPNOTSUPP, unix.EISDIR) {
				got.file, err = openNamed(in, rank, extra)
			}
		}
		if err == nil {
			got.direct = extra != 0
			break
		}
		if i == 0 && len(flags) == 2 && isAny(err, unix.EINVAL) {
			got.why = "the filesystem refuses it"
			continue
		}
		if st, serr := in.Info(); serr == nil && st.Links == 0 {
			err = unix.ENOENT // the folder was removed, for which file systems have other words
		}
		return got, &Error{Op: "create", File: got.name, Off: 0, Len: -1, Err: cause(err)}
	}
	if got.direct {
		mem, off := directAlign(got.file)
		got.memAlign = mem
		if off > Page || mem > Page {
			got.direct, got.memAlign = false, 1
			got.why = fmt.Sprintf("it wants multiples of %d bytes", max(off, mem))
			if err := clearDirect(got.file); err != nil {
				return got, errors.Join(&Error{Op: "open", File: got.name, Len: -1, Err: err}, got.file.Close())
			}
		}
	}
	return got, nil
}

func isAny(err error, list ...error) bool {
	for _, e := range list {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

const stalePrefix, staleSuffix = ".spillway-", ".disk"

// openNamed makes a file, locks it and takes its name away.
func openNamed(in filesys.Folder, rank, extra int) (filesys.File, error) {
	for range 100 {
		name := fmt.Sprintf("%s%d-%d-%08x%s", stalePrefix, os.Getpid(), rank, rand.Uint32(), staleSuffix)
		f, err := in.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL|extra, 0o600)
		if errors.Is(err, os.ErrExist) {
			continue
		}
		if err != nil {
			if extra != 0 && isAny(err, unix.EINVAL) {
				_ = in.Remove(name) // it is made before the flag is refused
			}
			return nil, err
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) { // another start takes it for stale
			_ = f.Close()
			continue
		}
		if err := in.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, errors.Join(err, f.Close())
		}
		return f, nil
	}
	return nil, errors.New("no free name")
}

// removeStale removes files that lost their owner before they lost their name. What it
// can't lock belongs to someone, and so does what another user made.
func removeStale(in filesys.Folder) {
	names, err := in.Names()
	if err != nil {
		return // Create will say so
	}
	user, known := int64(0), false
	for _, name := range names {
		if !strings.HasPrefix(name, stalePrefix) || !strings.HasSuffix(name, staleSuffix) {
			continue
		}
		if !known {
			if user, err = in.Owner(); err != nil {
				return
			}
			known = true
		}
		f, err := in.OpenFile(name, os.O_RDWR|filesys.NoWait, 0)
		if err != nil {
			continue
		}
		a, errA := f.Stat()
		if errA == nil && a.Mode.IsRegular() && a.Owner == user && unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			if b, err := in.Lstat(name); err == nil && filesys.Same(a, b) {
				_ = in.Remove(name)
			}
		}
		_ = f.Close()
	}
}

// lockFolder takes the folder's lock, shared with other jobs: who made the
// folder removes it only when nobody else has it. False: it was removed
// meanwhile.
func (f *Folder) lockFolder() (bool, error) {
	d, err := f.f.OpenFile(".", os.O_RDONLY, 0)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, &Error{Op: "open folder", File: f.dir, Len: -1, Err: cause(err)}
	}
	for range 1000 {
		// Without error it is held; with another one the filesystem has no locks.
		if !errors.Is(unix.Flock(int(d.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK) {
			break
		}
		time.Sleep(time.Millisecond) // its maker is removing it
	}
	st, err := d.Stat()
	if err != nil || !f.named(st) {
		return false, d.Close()
	}
	f.lock = d
	return true, nil
}

// named tells whether the folder has its path still, or another folder has it: what was
// opened is used then.
func (f *Folder) named(st filesys.Info) bool {
	now, err := f.opts.Folders.Open(f.dir)
	if err != nil {
		return false
	}
	defer now.Close()
	named, err := now.Info()
	return err == nil && filesys.Same(st, named)
}

// alone tells whether no other job has the folder's lock; until that is closed
// no other gets it then.
func (f *Folder) alone() bool {
	return !errors.Is(unix.Flock(int(f.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// freeText says how much room the file's filesystem has.
func freeText(f filesys.File) string {
	var s unix.Statfs_t
	if unix.Fstatfs(int(f.Fd()), &s) != nil {
		return ""
	}
	return fmt.Sprintf(" (%s are free there)", humanize.IBytes(s.Bavail*uint64(s.Bsize)))
}

// directAlign returns what memory addresses and file offsets of direct I/O must
// be multiples of.
func directAlign(f filesys.File) (mem, off int) {
	var s unix.Statx_t
	err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &s)
	if err != nil || s.Mask&unix.STATX_DIOALIGN == 0 || s.Dio_mem_align == 0 || s.Dio_offset_align == 0 {
		return Page, Page // a kernel before 6.1: a page serves every disk
	}
	return int(s.Dio_mem_align), int(s.Dio_offset_align)
}

// probeDirect reads a page; some filesystems take the flag and refuse the I/O.
func probeDirect(f filesys.File, align int) (why string) {
	buf, err := mapPages(Page)
	if err != nil {
		return ""
	}
	defer func() { _ = unmapPages(buf) }()
	if _, err := f.ReadAt(buf, 0); isAny(err, unix.EINVAL, unix.EOPNOTSUPP) {
		return "reads with it fail: " + cause(err).Error()
	}
	return ""
}

func clearDirect(f filesys.File) error {
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_SETFL, flags&^unix.O_DIRECT)
	}
	return err
}

// mapPages maps memory. It asks for huge pages: a request from scattered small
// ones has so many segments that the kernel splits it (1 MiB on a virtio disk in
// two or more), at half the speed.
func mapPages(n int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	return b, nil
}

func unmapPages(b []byte) error { return os.NewSyscallError("munmap", unix.Munmap(b)) }
