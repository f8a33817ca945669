package algo

import (
	"math"
	"slices"

	"github.com/spillway-ml/spillway/comm"
)

// Choice is the fastest algorithm in a measurement of an operation on a buffer of one
// size.
type Choice struct {
	Op        comm.Op `json:"op"`
	Bytes     int64   `json:"bytes"`
	Algorithm Name    `json:"algorithm"`
}

// Table holds measurements for groups of a given size. Auto chooses from it in such
// groups. All ranks must have the same table, so that they choose the same algorithm.
type Table struct {
	Ranks   int
	Choices []Choice
}

// OneBracketing lists the algorithms from which Auto chooses. They all add in the order of
// comm.Adder and give the same bits.
var OneBracketing = []Name{Direct, Tree, Halving, Hierarchical, Server}

// Best returns the choice measured at the size nearest to bytes, by ratio. It returns ""
// if the table has no measurement of the operation with that number of ranks. Hierarchical is
// considered only with at least two ranks on a host.
func (t Table) Best(op comm.Op, ranks, perHost int, bytes int64) (best Name) {
	least := math.Inf(1)
	for _, c := range t.Choices {
		if c.Op != op || t.Ranks != ranks || !slices.Contains(OneBracketing, c.Algorithm) || c.Algorithm == Hierarchical && perHost < 2 {
			continue
		}
		a, b := float64(max(c.Bytes, 1)), float64(max(bytes, 1))
		if ratio := max(a, b) / min(a, b); ratio < least {
			best, least = c.Algorithm, ratio
		}
	}
	return best
}
