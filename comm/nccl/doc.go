// Package nccl is the transport over NVIDIA's NCCL, between processes on one host or many
// with one GPU for each rank. NCCL moves bytes; Spillway adds them on the GPU in its own fixed
// order, so that a sum has the same bits as on every other transport.
//
// A Control does what NCCL does not: the initial exchange between ranks, the watchdog, and
// spreading errors to all ranks.
package nccl
