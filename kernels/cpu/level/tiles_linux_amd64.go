package level

import (
	"syscall"
	"unsafe"
)

// permitTiles asks Linux to let this process use AMX's tile data, as it must
// before the first tile instruction, and reports whether it may. The request
// fails where a thread's signal stack could not hold the tiles' 8 KiB; Go's
// have 32 KiB.
func permitTiles() bool {
	const (
		getPermission = 0x1022 // ARCH_GET_XCOMP_PERM
		askPermission = 0x1023 // ARCH_REQ_XCOMP_PERM
		tileData      = 18     // XFEATURE_XTILEDATA
	)
	if _, _, errno := syscall.RawSyscall(syscall.SYS_ARCH_PRCTL, askPermission, tileData, 0); errno != 0 {
		return false
	}
	var mask uint64
	_, _, errno := syscall.RawSyscall(syscall.SYS_ARCH_PRCTL, getPermission, uintptr(unsafe.Pointer(&mask)), 0)
	return errno == 0 && mask&(1<<tileData) != 0
}
