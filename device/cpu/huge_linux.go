package cpu

import "golang.org/x/sys/unix"

// adviseHuge asks for huge pages. If there are none, small pages are used.
func adviseHuge(b []byte) { _ = unix.Madvise(b, unix.MADV_HUGEPAGE) }
