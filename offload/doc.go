// Package offload moves data that the device does not need at the moment to host memory or
// disk: optimizer states and their updates (ZeRO-Offload: Ren et al., 2021), parameters,
// gradients and activations (ZeRO-Infinity: Rajbhandari et al., 2021).
//
// It rewrites the sharded program before it is scheduled: it changes buffers' memory spaces and
// inserts copies and throttles. Later passes add the events, and package memplan the addresses.
//
//	before:  compute:  fwd u │ … │ bwd u │ adamw u(g, v, m)
//	after:   copy-in:  ● fetch v           ● fetch v             (parameters=host)
//	         compute:    fwd u │ …        │  bwd u
//	         copy-out:                             ● park g       (gradients=host)
//	         host:                                   ● adamw u(g, v, m)  (optimizer=host)
//
// The results do not change: the same operations compute on the same values, in host memory instead
// of the device's.
package offload
