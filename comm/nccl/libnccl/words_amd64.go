//go:build linux

package libnccl

import (
	"unsafe"

	"github.com/spillway-ml/spillway/comm/nccl"
)

// initWords are the arguments of ncclCommInitRankConfig(comm*, nranks, id, rank, config*).
// By the System V convention a struct of more than 16 bytes goes to the stack by value, and
// the arguments behind it go on with the registers, of which there are six.
func initWords(comm uintptr, ranks int, id *nccl.ID, rank int, config uintptr) []uintptr {
	words := []uintptr{comm, uintptr(ranks), uintptr(rank), config, 0, 0}
	return append(words, (*[nccl.IDBytes / 8]uintptr)(unsafe.Pointer(id))[:]...)
}
