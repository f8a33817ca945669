// Package libnccl opens NVIDIA's NCCL at run time, without cgo, for package comm/nccl.
package libnccl

// Names are the files that are looked for.
var Names = []string{"libnccl.so.2"}
