package search

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/precision"
)

// Hardware is what a plan's time is predicted on.
type Hardware struct {
	// Machine gives the rates of one of so many ranks; CPUHardware and DeviceHardware set it.
	// nil: no time can be predicted, and Fit refuses it.
	Machine func(ranks int) *cost.Machine
	// NodeSize is the ranks of a node where ranks are counted in nodes; 0: they are
	// not.
	NodeSize int
	// HalfPrecision says that products of 16-bit operands have units of their own.
	HalfPrecision bool
	// Larger lists devices with more memory that could take the place of this one.
	Larger []LargerDevice
	// HostShare is what a rank may have of its server's memory in bytes where
	// Spec.Capacity caps nothing: neither a search nor a way out goes beyond
	// it, whatever would be faster. 0: anything goes.
	HostShare int64
	// Variants are jobs with other numbers that need less memory.
	Variants []Variant
	// Budget is what searches evaluate together; nil: each has its own, of Effort plans.
	Budget *Budget
	// Effort is how many plans one search may evaluate; 0: all that Budget has left, or as many
	// as take about 5 s of a processor. The outcome depends on it, and on no clock.
	Effort int
	// Prefer is the precision that Fit takes where none was given: one that the
	// device has units for, as bf16. fp32: that of the Spec.
	Prefer precision.Precision
}

// assumed caps the host memory of a configuration that has no cap of its own by
// the server's share, and says whether it did.
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

// CPUHardware is a CPU device with so many threads, before it is calibrated.
func CPUHardware(threads int) Hardware {
	return Hardware{Machine: func(ranks int) *cost.Machine { return cost.CPU(threads, ranks) }}
}
