//go:build linux

package libnccl

import (
	"unsafe"

	"github.com/spillway-ml/spillway/comm/nccl"
)

// initWords are the arguments of ncclCommInitRankConfig(comm*, nranks, id, rank, config*).
// By the System V convention a struct of more than 16 bytes is passed by value on the stack;
// the later arguments continue to use the six argument registers.
func initWords(comm uintptr, ranks int, id *nccl.ID, rank int, config uintptr) []uintptr {
	words := []uintptr{comm, uintptr(ranks), uintptr(rank), config, 0, 0}
	return append(words, (*[nccl.IDBytes / 8]uintptr)(unsafe.Pointer(id))[:]...)
}
