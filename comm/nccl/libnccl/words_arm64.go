//go:build linux

package libnccl

import (
	"unsafe"

	"github.com/spillway-ml/spillway/comm/nccl"
)

// initWords are the arguments of ncclCommInitRankConfig(comm*, nranks, id, rank, config*).
// By the 64-bit Arm convention a struct of more than 16 bytes is passed as the address of
// a copy, which the callee may change.
func initWords(comm uintptr, ranks int, id *nccl.ID, rank int, config uintptr) []uintptr {
	return []uintptr{comm, uintptr(ranks), uintptr(unsafe.Pointer(id)), uintptr(rank), config}
}
