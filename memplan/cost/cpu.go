package cost

import "github.com/spillway-ml/spillway/graph"

// CPU returns estimated rates of the CPU device, for use before it is calibrated. The ranks
// are groups of goroutines of one process and share its threads. The rates are those of a
// server core with 512-bit units (190 GFLOP/s in matrix products) and of two memory channels.
func CPU(threads, ranks int) *Machine {
	n := float64(max(threads, 1))
	return &Machine{
		Name:   "cpu",
		Matrix: map[graph.DType]float64{graph.F32: 190e9 * n},
		Vector: 8e9 * n, Memory: 15e9 * n,
		AttentionShare: 0.5,
		Launch:         10e-6,
		// A copy or collective runs on its stream's own thread.
		ToDevice: 5e9, ToHost: 5e9, DiskRead: 1e9, DiskWrite: 1e9, HostMemory: 15e9 * n,
		Intra: Link{Latency: 20e-6, Bandwidth: 5e9},
		Cores: max(threads, 1), Sharers: max(ranks, 1),
	}
}
