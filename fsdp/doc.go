// Package fsdp turns an unsharded program into a program of flat, sharded units. It rewrites the
// program to do what PyTorch's FSDP does with module hooks.
//
// Note: the buffers of a unit u, N ranks, flat length P (a multiple of 256·N):
//
//	value/u    P or P/N   resident parameters: whole below stage 3, the shard at 3
//	unshard/u  P          gathered parameters, one buffer for each stretch of use (stage 3)
//	grad/u     P          gradients of this rank; kept (stages 0, 1) or until reduced (2, 3)
//	reduced/u  P/N        reduced gradients (stages 2, 3)
//	exp_avg/u …  P or P/N optimizer states: whole at stage 0, the shard above
//
// With parameters of 16 bits (package precision) there are also P elements; T is the 16-bit
// type:
//
//	value/u    T    resident, with which the model computes; whole below stage 3
//	master/u   f32  changed by the update and saved by the host: in the shard from
//	                stage 1 on (class optimizer). With states in bf16 there is none: the
//	                update rounds value/u itself
//	grad/u     T    f32 with Reduce32, and if micro-steps accumulate in it
//	accum/u    f32  P or P/N: sum over micro-steps of reduced gradients
//	wire/u     T    copy of an f32 sum in which it is reduced
//
// A frozen unit that is stored in another type (base.go) has, instead of value/u:
//
//	base/u     T    P or P/N; in int8 P codes and P/256 scales. It is converted into
//	                unshard/u before each stretch, at every stage
//
// With Options.Reproducible (way.go), in every precision:
//
//	leaves/u   T    P: all ranks' gradients of a micro-step, of this rank's part
//	accum/u    f32  P/N: their sum
//	sum/u      f32  P: the same gathered (stage 0)
//
// A unit with less than 256 elements a rank stays whole: all of these have P elements at every
// stage. It has accum/u if each micro-step is reduced, and never unshard/u.
//
// On a mesh of two axes (HSDP) N is the size of the shard axis.
//
// A parameter is a view into value/u or unshard/u, its gradient one into grad/u.
// Each starts at a multiple of 256 elements, and shards split at such multiples,
// so that norms over 256-element blocks do not depend on the partition.
package fsdp
