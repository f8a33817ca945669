// Package nccl is communication between processes with a GPU for each rank, on one host or
// many, over NVIDIA's NCCL. NCCL moves bytes; Spillway adds them on the GPU, in its own
// order, so that a sum has the bits that it has on every other transport.
//
// What NCCL does not do goes over a Control: the ranks' first words to each other, the
// watchdog, and the news of an error.
package nccl
