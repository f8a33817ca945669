package algo

import (
	"math"
	"slices"

	"github.com/spillway-ml/spillway/comm"
)

// Choice is an algorithm that was measured to be the fastest for an operation on a
// buffer of so many bytes.
type Choice struct {
	Op        comm.Op `json:"op"`
	Bytes     int64   `json:"bytes"`
	Algorithm Name    `json:"algorithm"`
}

// Table is what was measured between the ranks of a group of a size: Auto chooses by it
// there, the same on every rank that has the same table.
type Table struct {
	Ranks   int
	Choices []Choice
}

// OneBracketing are the algorithms that Auto chooses from: they add in one order.
var OneBracketing = []Name{Direct, Tree, Halving, Hierarchical, Server}

// Best is the choice for the size nearest to bytes, by their ratio; "" where none was
// measured of the operation in a group of so many ranks. Hierarchical takes hosts with
// two ranks or more.
func (t Table) Best(op comm.Op, ranks, perHost int, bytes int64) (best Name) {
	least := math.Inf(1)
	for _, c := range t.Choices {
		if c.Op != op || t.Ranks != ranks || !slices.Contains(OneBracketing, c.Algorithm) || c.Algorithm == Hierarchical && perHost < 2 {
			continue
		}
		if d := math.Abs(math.Log(float64(max(c.Bytes, 1)) / float64(max(bytes, 1)))); d < least {
			best, least = c.Algorithm, d
		}
	}
	return best
}
