package cpu

import "golang.org/x/sys/unix"

// adviseHuge asks for huge pages; where there are none, small ones serve.
func adviseHuge(b []byte) { _ = unix.Madvise(b, unix.MADV_HUGEPAGE) }
