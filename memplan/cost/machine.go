// Package cost predicts the time of a program: it runs the operations on the
// streams that they are on, in the order that the events allow, each for the
// time that a machine's rates give it.
package cost

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// Link is one direction of a rank's link to its peers.
type Link struct {
	Latency   float64 // s a message (α)
	Bandwidth float64 // bytes/s (1/β); 0: there is no such link
}

// Machine is the speed of one rank and of its links, as pure data.
type Machine struct {
	Name string

	// Matrix is the peak of matrix products in FLOP/s by the operands' type, and
	// Vector that of everything else. Memory is the peak traffic in bytes/s.
	Matrix map[graph.DType]float64
	Vector float64
	Memory float64
	// MatrixShare, AttentionShare and MemoryShare are the shares of the peaks that
	// kernels reach; 0 is taken for 1.
	MatrixShare, AttentionShare, MemoryShare float64
	// Launch is the least time of an operation, in s.
	Launch float64
	// Measured replaces the rates for single classes of operations (a calibrated
	// machine).
	Measured map[Class]Rates

	// ToDevice and ToHost are copies between device and host memory, DiskRead and
	// DiskWrite between host memory and disk, HostMemory the traffic of kernels
	// that run on the host; bytes/s.
	ToDevice, ToHost, DiskRead, DiskWrite, HostMemory float64

	// NodeSize ranks share a node (0: all do). Within one they talk over Intra;
	// each has its share Inter of the network between nodes.
	NodeSize int
	Intra    Link
	Inter    Link

	// Cores, where it is not 0, says that all streams of Sharers ranks compute,
	// copy and communicate on so many processor cores, as the CPU device does; the
	// rates above are then those of all cores together. 0: each stream of each rank
	// has an engine of its own.
	Cores, Sharers int
	// Start is what a section takes before and behind its operations, Gap what a
	// measured operation takes beside its rates, and Handoff what it takes longer
	// where it waits for one of another stream; s.
	Start, Gap, Handoff float64
	// Wait is what a measured collective takes beside its rates because ranks wait for each
	// other, and because what it reads and writes is in no cache.
	Wait Rate
}

// Validate refuses rates that are not positive numbers where one is needed, and no
// machine.
func (m *Machine) Validate() error {
	if m == nil {
		return errors.New("cost: no machine is given: its rates are needed")
	}
	bad := func(v float64) bool { return !(v > 0) || math.IsInf(v, 0) }
	if bad(m.Memory) || bad(m.Vector) || bad(m.Matrix[graph.F32]) {
		return fmt.Errorf("cost: machine %q: memory %g B/s, vector %g and fp32 matrix rate %g FLOP/s; all must be positive", m.Name, m.Memory, m.Vector, m.Matrix[graph.F32])
	}
	return nil
}

func share(v float64) float64 {
	if v <= 0 {
		return 1
	}
	return v
}

// matrixRate is the rate of products with operands of type d: a type without
// units of its own runs at the rate of fp32.
func (m *Machine) matrixRate(d graph.DType) float64 {
	if r := m.Matrix[d]; r > 0 {
		return r
	}
	return m.Matrix[graph.F32]
}

// Work is what one execution of an operation on one rank needs.
type Work struct {
	Alone float64 // s, if nothing else runs on the machine
	Core  float64 // s of one processor core, if all cores are busy; 0 where the machine has no Cores
	Disk  float64 // s of the disk that the ranks share
}

// later is the work with so much more time of one core before it.
func (w Work) later(s float64) Work {
	w.Alone += s
	if w.Core > 0 {
		w.Core += s
	}
	return w
}

// Op predicts what one execution of op on one rank needs. Computation takes
// the larger of the time of its arithmetic and that of its traffic (the roofline
// of Williams, Waterman and Patterson, CACM 2009), collectives α + β·bytes.
func (m *Machine) Op(p *graph.Program, op *graph.Op) Work {
	if op.Kind == graph.Join {
		return Work{}
	}
	if len(m.Measured) > 0 {
		if r, ok := m.Measured[ClassOf(p, op)]; ok {
			size := SizeOf(p, op)
			w := r.work(size).later(m.Gap)
			if IsCollective(op) {
				w = w.later(m.Wait.Of(size))
			}
			if m.Cores == 0 {
				w.Core, w.Disk = 0, 0
			}
			return w
		}
	}
	w := Work{Alone: m.roofline(p, op)}
	if m.Cores == 0 {
		return w
	}
	switch {
	case op.Kind == graph.Copy:
		w.Core = w.Alone // by the stream's own thread
		if p.Buf(op.In[0]).Space == graph.Disk || p.Buf(op.Out[0].Buf).Space == graph.Disk {
			w.Core, w.Disk = w.Alone/4, w.Alone // checksums
		}
	case IsCollective(op), op.Kind == graph.Send, op.Kind == graph.Recv:
		w.Core = w.Alone
	default:
		w.Core = w.Alone * float64(m.Cores)
	}
	return w
}

func (m *Machine) roofline(p *graph.Program, op *graph.Op) float64 {
	flops, bytes := graph.Cost(p, op)
	switch {
	case IsCollective(op):
		return m.collective(p, op)
	case op.Kind == graph.Send || op.Kind == graph.Recv:
		return m.message(p, op)
	case op.Kind == graph.Copy:
		return m.copy(p, op)
	case slices.Contains(products, op.Kind):
		rate := m.matrixRate(p.Buf(op.In[0]).DType)
		if a, ok := op.Attr.(graph.LinearAttr); ok && a.Int8 {
			rate = max(rate, m.matrixRate(graph.I8))
			bytes += 2 * graph.Int8Traffic(p, op)
		}
		rate *= share(m.MatrixShare)
		return m.Launch + max(float64(flops)/rate, m.traffic(op, bytes))
	case slices.Contains(attention, op.Kind):
		rate := m.matrixRate(p.Buf(op.In[0]).DType) * share(m.AttentionShare)
		return m.Launch + max(float64(flops)/rate, m.traffic(op, bytes))
	}
	return m.Launch + max(float64(flops)/m.Vector, m.traffic(op, bytes))
}

func (m *Machine) traffic(op *graph.Op, bytes int64) float64 {
	if op.Stream == graph.HostWork && m.HostMemory > 0 {
		return float64(bytes) / m.HostMemory
	}
	return float64(bytes) / (m.Memory * share(m.MemoryShare))
}

func (m *Machine) copy(p *graph.Program, op *graph.Op) float64 {
	from, to := p.Buf(op.In[0]), p.Buf(op.Out[0].Buf)
	n := float64(from.Bytes())
	rate := m.Memory * share(m.MemoryShare) / 2 // read and written
	switch {
	case from.Space == graph.Host && to.Space == graph.Device:
		rate = m.ToDevice
	case from.Space == graph.Device && to.Space == graph.Host:
		rate = m.ToHost
	case from.Space == graph.Disk:
		rate = m.DiskRead
	case to.Space == graph.Disk:
		rate = m.DiskWrite
	case from.Space == graph.Host && m.HostMemory > 0:
		rate = m.HostMemory / 2
	}
	if rate <= 0 {
		rate = m.Memory / 2
	}
	return m.Launch + n/rate
}

// group returns how a collective's ranks lie: ranks of the group in a node, and
// nodes. The last axis of the mesh varies fastest over ranks.
func (m *Machine) group(p *graph.Program, axis int) (inNode, nodes int) {
	size, stride := p.WorldSize(), 1
	if axis >= 0 {
		size = p.Mesh[axis].Size
		for _, a := range p.Mesh[axis+1:] {
			stride *= a.Size
		}
	}
	node := m.NodeSize
	if node <= 0 {
		node = p.WorldSize()
	}
	// Neighbours of the group are stride ranks apart.
	inNode = min(size, max(1, node/stride))
	return inNode, (size + inNode - 1) / inNode
}

// Sent returns the bytes that a rank of the group sends in a collective, as a
// ring would; false for other operations.
func Sent(p *graph.Program, op *graph.Op) (int64, bool) {
	var whole, passes int64 = 0, 1
	switch op.Kind {
	case graph.AllGather:
		whole = p.Buf(op.Out[0].Buf).Bytes()
	case graph.ReduceScatter, graph.AllToAll:
		whole = p.Buf(op.In[0]).Bytes()
	case graph.AllReduce:
		whole, passes = p.Buf(op.Out[0].Buf).Bytes(), 2
	default:
		return 0, false
	}
	n := int64(p.WorldSize())
	if axis := op.Attr.(graph.GroupAttr).Axis; axis >= 0 {
		n = int64(p.Mesh[axis].Size)
	}
	return passes * whole / n * (n - 1), true
}

// message is the time of a message between neighbours along a mesh axis.
func (m *Machine) message(p *graph.Program, op *graph.Op) float64 {
	link := m.Intra
	if inNode, _ := m.group(p, op.Attr.(graph.PeerAttr).Axis); inNode == 1 {
		link = m.Inter
	}
	_, bytes := graph.Cost(p, op)
	if link.Bandwidth <= 0 {
		return m.Launch + m.traffic(op, 2*bytes)
	}
	return m.Launch + link.Latency + max(float64(bytes)/link.Bandwidth, m.traffic(op, 2*bytes))
}

// collective is the time of a collective by the α-β model (Thakur, Rabenseifner
// and Gropp, "Optimization of Collective Communication Operations in MPICH",
// 2005). Over several nodes it is pipelined: every rank's part crosses the network at
// the rank's share of it while the node's own links spread it, so the slower of both
// counts. Latencies are those that NCCL 2.19 counts (src/graph/tuning.cc): of a gather or
// scatter a ring over all ranks, of an all-reduce a ring in the node and a tree over the
// nodes; of an exchange one for each pair.
func (m *Machine) collective(p *graph.Program, op *graph.Op) float64 {
	total, _ := Sent(p, op)
	passes := 1.0
	if op.Kind == graph.AllReduce {
		passes = 2
	}
	sent := float64(total) / passes
	inNode, nodes := m.group(p, op.Attr.(graph.GroupAttr).Axis)
	n := float64(inNode * nodes)
	if n <= 1 {
		return 0
	}
	within, across := (inNode-1)*nodes, nodes-1
	switch op.Kind {
	case graph.AllReduce:
		within, across = inNode-1, bits.Len(uint(nodes-1))
	case graph.AllToAll:
		within, across = inNode-1, (nodes-1)*inNode
	}
	latency, beta := float64(float64(within)*m.Intra.Latency)+float64(float64(across)*m.Inter.Latency), 0.0
	if inNode > 1 {
		beta = 1 / m.Intra.Bandwidth
	}
	if nodes > 1 {
		// The bytes that a rank sends to other nodes, as a share of all that it sends. In a gather or
		// a reduction the ranks of a node divide the traffic between nodes. In an all-to-all each
		// rank's data differ, so there is nothing to divide.
		cross := float64(nodes-1) / float64(nodes) / ((n - 1) / n)
		if op.Kind != graph.AllToAll {
			cross /= float64(inNode)
		}
		beta = max(beta, cross/m.Inter.Bandwidth)
	}
	// What arrives is also written to memory, and read where it is added.
	return m.Launch + float64(passes*(latency+max(float64(sent*beta), 2*sent/(m.Memory*share(m.MemoryShare)))))
}
