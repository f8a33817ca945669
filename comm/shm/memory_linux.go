package shm

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// hugeSize is the size of a huge page on the processors that we know.
const hugeSize = 2 << 20

func address(b []byte) int64 { return int64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// huge puts untouched memory on huge pages. MADV_HUGEPAGE, which suffices for private memory,
// has no effect on a memfd if shmem_enabled is "never", the default of most systems.
// MADV_COLLAPSE (Linux 6.1) works if at least one small page is present. After an error some of
// the memory stays in small pages, which is slower but correct.
func huge(b []byte) error {
	b = b[:len(b)/hugeSize*hugeSize]
	if len(b) == 0 {
		return nil
	}
	for i := 0; i < len(b); i += hugeSize {
		b[i] = 0
	}
	return os.NewSyscallError("madvise", unix.Madvise(b, unix.MADV_COLLAPSE))
}

// mapped is a range of a job's file that this process has mapped.
type mapped struct {
	data  []byte
	unmap func() error
}

// mapFile maps bytes of a file from off, a multiple of hugeSize, with unreadable
// pages around them.
func mapFile(f *os.File, off, bytes int64) (*mapped, error) {
	page := int64(os.Getpagesize())
	length := (bytes + page - 1) / page * page
	whole, err := unix.Mmap(-1, 0, int(length+2*page+hugeSize), unix.PROT_NONE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, unmapped(err)
	}
	start := page + (hugeSize-(address(whole)+page)%hugeSize)%hugeSize
	where := unsafe.Pointer(&whole[start])
	if _, err := unix.MmapPtr(int(f.Fd()), off, where, uintptr(length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		_ = unix.Munmap(whole)
		return nil, unmapped(err)
	}
	_ = unix.Madvise(whole[start:start+length], unix.MADV_HUGEPAGE)
	return &mapped{
		data:  whole[start : start+bytes : start+bytes],
		unmap: func() error { return os.NewSyscallError("munmap", unix.Munmap(whole)) },
	}, nil
}

// unmapped returns the error of a mapping, with advice.
func unmapped(err error) error {
	if err == unix.ENOMEM { // this also happens if the machine has free memory
		return fmt.Errorf("mmap: %w: a process maps the memory of all ranks: raise ulimit -v", err)
	}
	return os.NewSyscallError("mmap", err)
}
