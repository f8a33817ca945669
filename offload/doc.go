// Package offload moves what a step does not need on the device just now to
// host memory or disk: optimizer states and their updates (ZeRO-Offload: Ren et
// al., 2021), parameters, gradients and activations (ZeRO-Infinity: Rajbhandari
// et al., 2021).
//
// It is a rewrite of the sharded program, before it is scheduled: it gives
// buffers another memory space and inserts copies and throttles; what gets which
// address, and which events are needed, follows from that elsewhere.
//
//	before:  compute:  fwd u │ … │ bwd u │ adamw u(g, v, m)
//	after:   copy-in:  ● fetch v           ● fetch v             (parameters=host)
//	         compute:    fwd u │ …        │  bwd u
//	         copy-out:                             ● park g       (gradients=host)
//	         host:                                   ● adamw u(g, v, m)  (optimizer=host)
//
// Nothing of the arithmetic changes: the same kernels run on the same bytes, on
// the host's memory instead of the device's.
package offload
