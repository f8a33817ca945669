package gpus

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
)

// Shares of the peaks that good kernels reach, used until a measurement exists: cuBLAS on large
// products (70 to 80 % on A100 and H100), FlashAttention-2 (50 to 70 %, Dao 2023; less backward),
// and copies of device memory (≈ 90 %).
const (
	matrixShare    = 0.72
	attentionShare = 0.5
	memoryShare    = 0.88
	linkShare      = 0.8 // of NVLink, PCIe and network (NCCL's bus bandwidth)

	launch       = 3e-6 // s: a kernel of a captured graph, with its ramp
	intraLatency = 3e-6 // s a message over NVLink or PCIe
	interLatency = 12e-6
)

// NodeGPUs is the usual number of GPUs of a server.
const NodeGPUs = 8

// Machine returns the rates of one rank on this GPU if nodeSize of these GPUs share a server.
func (g GPU) Machine(nodeSize int) *cost.Machine {
	intra := g.NVLink
	if intra == 0 {
		intra = g.PCIe / 2 // through the host: every byte passes the bus out and in
	}
	m := &cost.Machine{
		Name: g.Name,
		Matrix: map[graph.DType]float64{
			graph.F32: g.Rates.FP32, graph.F16: g.Rates.FP16, graph.BF16: g.Rates.BF16, graph.I8: g.Rates.INT8,
		},
		Vector: g.Rates.FP32, Memory: g.MemoryBandwidth,
		MatrixShare: matrixShare, AttentionShare: attentionShare, MemoryShare: memoryShare, Launch: launch,
		ToDevice: linkShare * g.PCIe, ToHost: linkShare * g.PCIe,
		// A data-centre NVMe drive for each GPU, and a GPU's share of a server's memory
		// bandwidth.
		DiskRead: 6e9, DiskWrite: 3e9, HostMemory: 40e9,
		NodeSize: nodeSize,
		Intra:    cost.Link{Latency: intraLatency, Bandwidth: linkShare * intra},
		Inter:    cost.Link{Latency: interLatency, Bandwidth: linkShare * g.Network},
	}
	return m
}

// Spread returns the rates of one rank if the given number of ranks runs on a machine with
// cards of these GPUs: one GPU each, or consecutive ranks share one.
func (g GPU) Spread(ranks, cards int) *cost.Machine {
	cards = max(min(cards, ranks), 1)
	each := (ranks + cards - 1) / cards
	switch {
	case cards == 1:
		return g.Shared(ranks)
	case each == 1:
		return g.Machine(ranks)
	}
	// Messages to ranks on other GPUs get this rank's part of the GPU's link.
	m, link := g.Shared(each), g.Machine(ranks).Intra
	m.NodeSize = ranks
	m.Intra.Bandwidth = min(m.Intra.Bandwidth, link.Bandwidth/float64(each))
	return m
}

// Shared returns the rates of one rank if the given number of ranks share this GPU. Each rank gets
// an equal part of all rates. Data that they exchange stays in the GPU's memory, where every byte
// is read and written once.
func (g GPU) Shared(ranks int) *cost.Machine {
	m := g.Machine(max(ranks, 1))
	part := 1 / float64(max(ranks, 1))
	for t, rate := range m.Matrix {
		m.Matrix[t] = rate * part
	}
	m.Vector, m.Memory = m.Vector*part, m.Memory*part
	m.ToDevice, m.ToHost = m.ToDevice*part, m.ToHost*part
	m.DiskRead, m.DiskWrite, m.HostMemory = m.DiskRead*part, m.DiskWrite*part, m.HostMemory*part
	m.Intra.Bandwidth = memoryShare * g.MemoryBandwidth / 2 * part
	return m
}
