package store

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
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
	memAlign int    // alignment of memory for direct I/O
	why      string // why direct I/O is impossible; empty if it is used, or not wanted
}

// openFile creates a rank's file without a name (O_TMPFILE): two jobs in one folder cannot
// collide, and the kernel frees the space when the process ends for any reason. On a filesystem
// without O_TMPFILE the file gets a name that is removed at once. Until then the file is locked,
// which tells removeStale that its owner is alive.
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
			err = unix.ENOENT // the folder was removed, for which filesystems return different errors
		}
		return got, &Error{Op: "create", File: got.name, Off: 0, Len: -1, Err: cause(err)}
	}
	if got.direct {
		mem, off := directAlign(got.file)
		got.memAlign = mem
		if off > Page || mem > Page {
			got.direct, got.memAlign = false, 1
			got.why = fmt.Sprintf("it wants multiples of %d bytes", max(off, mem))
			if err := filesys.ThroughCache(got.file); err != nil {
				return got, errors.Join(&Error{Op: "open", File: got.name, Len: -1, Err: err}, got.file.Close())
			}
		}
	}
	return got, nil
}

func isAny(err error, list ...error) bool {
	return slices.ContainsFunc(list, func(e error) bool { return errors.Is(err, e) })
}

const stalePrefix, staleSuffix = ".spillway-", ".disk"

// openNamed creates a file, locks it and removes its name.
func openNamed(in filesys.Folder, rank, extra int) (filesys.File, error) {
	for range 100 {
		name := fmt.Sprintf("%s%d-%d-%08x%s", stalePrefix, os.Getpid(), rank, rand.Uint32(), staleSuffix)
		f, err := in.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL|extra, 0o600)
		if errors.Is(err, os.ErrExist) {
			continue
		}
		if err != nil {
			if extra != 0 && isAny(err, unix.EINVAL) {
				_ = in.Remove(name) // the file is created before the flag is rejected
			}
			return nil, err
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) { // another process is checking whether it is stale
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

// removeStale removes files whose owner died before it removed their name. It leaves files that
// it cannot lock, which are in use, and files of other users.
func removeStale(in filesys.Folder) {
	names, err := in.Names()
	if err != nil {
		return // Create will return the error
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

// lockFolder takes a shared lock on the folder: the process that created the folder removes it
// only if no other process holds the lock. ok is false if the folder was removed in the
// meantime.
func (f *Folder) lockFolder() (bool, error) {
	d, err := f.f.OpenFile(".", os.O_RDONLY, 0)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, &Error{Op: "open folder", File: f.dir, Len: -1, Err: cause(err)}
	}
	for range 1000 {
		// No error: we have the lock. Another error: the filesystem has no locks.
		if !errors.Is(unix.Flock(int(d.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK) {
			break
		}
		time.Sleep(time.Millisecond) // the process that created the folder is removing it
	}
	st, err := d.Stat()
	if err != nil || !f.named(st) {
		return false, d.Close()
	}
	f.lock = d
	return true, nil
}

// named says whether the folder's path exists. If another folder has the path now, the one that
// was opened is still used.
func (f *Folder) named(st filesys.Info) bool {
	now, err := f.opts.Folders.Open(f.dir)
	if err != nil {
		return false
	}
	defer now.Close()
	named, err := now.Info()
	return err == nil && filesys.Same(st, named)
}

// alone says whether no other job has the folder's lock. If so, none can get it until ours is
// closed.
func (f *Folder) alone() bool {
	return !errors.Is(unix.Flock(int(f.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// freeText says, for an error, how much space is free on the file's filesystem.
func freeText(f filesys.File) string {
	var s unix.Statfs_t
	if unix.Fstatfs(int(f.Fd()), &s) != nil {
		return ""
	}
	return fmt.Sprintf(" (%s are free there)", humanize.IBytes(s.Bavail*uint64(s.Bsize)))
}

// directAlign returns the alignments of memory addresses and of file offsets for direct I/O.
func directAlign(f filesys.File) (mem, off int) {
	var s unix.Statx_t
	err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &s)
	if err != nil || s.Mask&unix.STATX_DIOALIGN == 0 || s.Dio_mem_align == 0 || s.Dio_offset_align == 0 {
		return Page, Page // before Linux 6.1 it is not reported; a page is enough for every disk
	}
	return int(s.Dio_mem_align), int(s.Dio_offset_align)
}

// probeDirect reads a page, because some filesystems accept the flag but not the I/O. It returns
// why direct I/O fails, "" if it works.
func probeDirect(f filesys.File, align int) (why string) {
	buf, err := filesys.MapPages(Page)
	if err != nil {
		return ""
	}
	defer func() { _ = filesys.UnmapPages(buf) }()
	if _, err := f.ReadAt(buf, 0); isAny(err, unix.EINVAL, unix.EOPNOTSUPP) {
		return "reads with it fail: " + cause(err).Error()
	}
	return ""
}
