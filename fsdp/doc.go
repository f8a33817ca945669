// Package fsdp turns a program of whole parameters into one of flat, sharded
// units: what PyTorch's FSDP does with module hooks, as a rewrite.
//
// Note: the buffers of a unit u, N ranks, flat length P (a multiple of 256·N):
//
//	value/u    P or P/N   resident parameters: whole below stage 3, the shard at 3
//	unshard/u  P          gathered parameters, one buffer for each use region (stage 3)
//	grad/u     P          gradients of this rank; kept (stages 0, 1) or until reduced (2, 3)
//	reduced/u  P/N        reduced gradients (stages 2, 3)
//	exp_avg/u …  P or P/N optimizer states: whole at stage 0, the shard above
//
// A parameter is a view into value/u or unshard/u, its gradient one into grad/u.
// Each starts at a multiple of 256 elements, and shards split at such multiples,
// so that norms over 256-element blocks do not depend on the partition.
package fsdp
