package filesys

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// createDirect creates a new file. If direct is set and the filesystem does direct I/O in blocks
// of Alignment, the file bypasses the page cache; the second result says whether it does.
func createDirect(in Folder, name string, direct bool) (File, bool, error) {
	const flags = os.O_WRONLY | os.O_CREATE | os.O_EXCL
	if direct {
		f, err := in.OpenFile(name, flags|Direct, 0o666)
		if err == nil {
			if tooCoarse(f) {
				return f, false, ThroughCache(f)
			}
			return f, true, nil
		}
		if !errors.Is(err, unix.EINVAL) {
			return nil, false, err
		}
		// The filesystem may refuse the flag after it created the name.
		if err := in.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, false, err
		}
	}
	f, err := in.OpenFile(name, flags, 0o666)
	return f, false, err
}

// OpenDirect opens a file for reading past the page cache. It returns nil if the filesystem
// cannot do direct I/O in blocks of Alignment.
func OpenDirect(in Folder, name string) (File, error) {
	f, err := in.OpenFile(name, os.O_RDONLY|Direct|NoWait, 0)
	if errors.Is(err, unix.EINVAL) {
		return nil, nil
	}
	if err != nil || !tooCoarse(f) {
		return f, err
	}
	return nil, f.Close()
}

// tooCoarse says whether direct I/O on f needs larger multiples than Alignment.
func tooCoarse(f File) bool {
	var st unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st); err != nil || st.Mask&unix.STATX_DIOALIGN == 0 {
		return false // unknown: most file systems need a disk's 512 or 4096
	}
	return st.Dio_offset_align > Alignment || st.Dio_mem_align > Alignment || st.Dio_offset_align == 0
}

// ThroughCache ends direct I/O on f.
func ThroughCache(f File) error {
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_SETFL, flags&^Direct)
	}
	return err
}

// mapPages maps n bytes of memory and asks for huge pages. Direct I/O from small scattered pages
// needs a segment for each page. That costs more CPU time than filling the pages. The kernel also
// splits the request: 1 MiB on a virtio disk into two or more, at half the speed.
func mapPages(n int64) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	return b, nil
}

func unmapPages(b []byte) error { return os.NewSyscallError("munmap", unix.Munmap(b)) }
