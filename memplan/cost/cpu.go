package cost

import "github.com/spillway-ml/spillway/graph"

// CPU returns what to expect of the CPU device before it is calibrated: the
// ranks are goroutine groups of one process and share its threads. The rates
// are those of a server core with 512-bit units (190 GFLOP/s of matrix
// products) and of two channels of its memory.
func CPU(threads, ranks int) *Machine {
	n := float64(max(threads, 1))
	return &Machine{
		Name:   "cpu",
		Matrix: map[graph.DType]float64{graph.F32: 190e9 * n},
		Vector: 8e9 * n, Memory: 15e9 * n,
		AttentionShare: 0.5,
		Launch:         10e-6,
		// Copies and collectives are a stream's own thread's.
		ToDevice: 5e9, ToHost: 5e9, DiskRead: 1e9, DiskWrite: 1e9, HostMemory: 15e9 * n,
		Intra: Link{Latency: 20e-6, Bandwidth: 5e9},
		Cores: max(threads, 1), Sharers: max(ranks, 1),
	}
}
