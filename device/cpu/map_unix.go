//go:build unix

package cpu

import (
	"os"

	"golang.org/x/sys/unix"
)

// mapping is an anonymous private mapping with unreadable pages around it.
type mapping struct {
	data  []byte // the arena
	size  int64  // its length
	whole []byte // the mapping with its guard pages
}

// hugeSize is the size of a huge page on supported processors. Arenas of at least this size
// ask for huge pages.
const hugeSize = 2 << 20

// mapMemory maps bytes bytes of zero memory, whose pages become resident when touched. Small
// arenas start at a page boundary. Arenas of hugeSize or more start at a huge page boundary and
// ask for huge pages. These never extend beyond the mapping, so that at most bytes, rounded up to
// a page, are resident.
func mapMemory(bytes int64) (mapping, error) {
	page := int64(os.Getpagesize())
	align := page
	if bytes >= hugeSize {
		align = hugeSize
	}
	length := (bytes + page - 1) / page * page
	whole, err := unix.Mmap(-1, 0, int(length+2*page+align), unix.PROT_NONE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return mapping{}, os.NewSyscallError("mmap", err)
	}
	start := page + (align-(address(whole)+page)%align)%align
	inner := whole[start : start+length : start+length]
	if err := unix.Mprotect(inner, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		_ = unix.Munmap(whole)
		return mapping{}, os.NewSyscallError("mprotect", err)
	}
	if align == hugeSize {
		adviseHuge(inner)
	}
	return mapping{data: inner[:bytes:bytes], size: bytes, whole: whole}, nil
}

func (m mapping) unmap() error {
	return os.NewSyscallError("munmap", unix.Munmap(m.whole))
}
