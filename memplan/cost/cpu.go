package cost

import "github.com/spillway-ml/spillway/graph"

// CPU returns what to expect of the CPU device before it is calibrated: the
// ranks are goroutine groups of one process and share its threads. The rates
// are those of a server core with 512-bit units (190 GFLOP/s of matrix
// products) and of two channels of its memory.
func CPU(threads, ranks int) *Machine {
	part := float64(max(threads, 1)) / float64(max(ranks, 1))
	return &Machine{
		Name:   "cpu",
		Matrix: map[graph.DType]float64{graph.F32: 190e9 * part},
		Vector: 8e9 * part, Memory: 15e9 * part,
		AttentionShare: 0.5,
		Launch:         10e-6,
		ToDevice:       5e9 * part, ToHost: 5e9 * part, DiskRead: 0.5e9 * part, DiskWrite: 0.5e9 * part, HostMemory: 15e9 * part,
		Intra:  Link{Latency: 20e-6, Bandwidth: 5e9 * part},
		Serial: true,
	}
}
