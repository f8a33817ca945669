// Package zero defines what each ZeRO stage partitions (Rajbhandari et al., "ZeRO: Memory
// Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5). It also has the
// optimizers that update a partition.
package zero

import "fmt"

// Stage is a ZeRO stage, 0 to 3.
type Stage int

// Stages.
const (
	Replicate       Stage = iota // 0: every rank holds everything
	PartitionStates              // 1 (P_os): optimizer states are sharded
	PartitionGrads               // 2 (P_os+g): reduced gradients too
	PartitionParams              // 3 (P_os+g+p): parameters too
)

// ParseStage returns the stage with number n, or an error if there is none.
func ParseStage(n int) (Stage, error) {
	if n < 0 || n > 3 {
		return 0, fmt.Errorf("zero: stage %d does not exist; use 0, 1, 2 or 3", n)
	}
	return Stage(n), nil
}

// ShardsStates says whether a rank holds only its part of the optimizer states.
func (s Stage) ShardsStates() bool { return s >= PartitionStates }

// ShardsGrads says whether a rank keeps only its part of the reduced gradients.
func (s Stage) ShardsGrads() bool { return s >= PartitionGrads }

// ShardsParams says whether a rank keeps only its part of the parameters.
func (s Stage) ShardsParams() bool { return s >= PartitionParams }

// ModelStateBytes returns the bytes of model states on a rank by the paper's formula (section 5,
// figure 1), with params parameters on the given number of ranks. weight and grad are the bytes of
// an element; states is the paper's K, the optimizer's bytes for each parameter (12 for
// mixed-precision Adam, 8 for fp32 Adam).
func (s Stage) ModelStateBytes(params, ranks, weight, grad, states float64) float64 {
	w, g, k := weight*params, grad*params, states*params
	if s.ShardsStates() {
		k /= ranks
	}
	if s.ShardsGrads() {
		g /= ranks
	}
	if s.ShardsParams() {
		w /= ranks
	}
	return w + g + k
}
