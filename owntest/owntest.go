// Package owntest checks an operation that a program brings along (graph.Definition).
// Only tests import it.
package owntest

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/optest"
)

// Check compares an operation with its own definition on random float inputs of the
// given shapes. It compares the CPU kernel with the fp64 reference, both for writing
// and for adding to the output. It checks that the kernel writes every output element
// and no input, and gives the same bits in any order of Parallel. It compares the
// derivative with differences of the reference along random directions. The error says
// which of these fails.
func Check(op *graph.Operation, attr any, in [][]int64, seed uint64) error {
	return optest.CheckOwn(op, attr, in, seed)
}
