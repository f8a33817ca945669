package search

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/precision"
)

// Hardware is the hardware for which a plan's time is predicted.
type Hardware struct {
	// Machine returns the rates of one of ranks ranks; CPUHardware and DeviceHardware set it. nil:
	// no time can be predicted, and Fit refuses it.
	Machine func(ranks int) *cost.Machine
	// NodeSize is the number of ranks of a node if ranks are counted in nodes; 0: they are not.
	NodeSize int
	// HalfPrecision is set if the device has units for products of 16-bit operands.
	HalfPrecision bool
	// Larger lists devices with more memory that could take the place of this one.
	Larger []LargerDevice
	// HostShare is a rank's share of its server's memory, in bytes. It caps host memory if
	// Spec.Capacity does not: neither a search nor a way out exceeds it. 0: no cap.
	HostShare int64
	// Variants are jobs that give other numbers and need less memory.
	Variants []Variant
	// Budget is shared by several searches; nil: each has its own, of Effort plans.
	Budget *Budget
	// Effort is the number of plans that one search may evaluate; 0: all that Budget has left, or
	// the number that takes about 5 s of a processor. The outcome depends on it, not on a clock.
	Effort int
	// Prefer is the precision that Fit uses if none was given, such as bf16 on a device that has
	// units for it. fp32: that of the Spec.
	Prefer precision.Precision
}

// assumed caps the host memory of a configuration without a cap by the server's share, and reports
// whether it did.
func (hw *Hardware) assumed(s *Spec) bool {
	if s.Capacity[graph.Host] > 0 || hw.HostShare == 0 {
		return false
	}
	s.Capacity[graph.Host] = hw.HostShare
	return true
}

// LargerDevice is a device that a plan could move to.
type LargerDevice struct {
	Name            string
	Memory, Outside int64 // bytes
	HostShare       int64 // bytes; see Hardware
	Machine         func(ranks int) *cost.Machine
}

// CPUHardware returns a CPU device with the given number of threads, before calibration.
func CPUHardware(threads int) Hardware {
	return Hardware{Machine: func(ranks int) *cost.Machine { return cost.CPU(threads, ranks) }}
}
