package shm

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// hugeSize is the size of a huge page on the processors that we know.
const hugeSize = 2 << 20

func address(b []byte) int64 { return int64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

func adviseHuge(b []byte) { _ = unix.Madvise(b, unix.MADV_HUGEPAGE) }

// mapFile maps bytes of a file from off, a multiple of hugeSize, with unreadable
// pages around them.
func mapFile(f *os.File, off, bytes int64) ([]byte, func() error, error) {
	page := int64(os.Getpagesize())
	length := (bytes + page - 1) / page * page
	whole, err := unix.Mmap(-1, 0, int(length+2*page+hugeSize), unix.PROT_NONE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, nil, os.NewSyscallError("mmap", err)
	}
	start := page + (hugeSize-(address(whole)+page)%hugeSize)%hugeSize
	where := unsafe.Pointer(&whole[start])
	if _, err := unix.MmapPtr(int(f.Fd()), off, where, uintptr(length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		_ = unix.Munmap(whole)
		return nil, nil, os.NewSyscallError("mmap", err)
	}
	inner := whole[start : start+bytes : start+bytes]
	adviseHuge(whole[start : start+length])
	return inner, func() error { return os.NewSyscallError("munmap", unix.Munmap(whole)) }, nil
}
