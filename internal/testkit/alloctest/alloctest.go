// Package alloctest counts the allocations of a function whose work is done by
// other goroutines as well.
package alloctest

import "testing"

// rounds is how often PerRun may count anew before it believes what it saw.
const rounds = 10

// PerRun is testing.AllocsPerRun, the least of several rounds. The count is of the
// whole process: a goroutine of an earlier test that ends, or a scheduler that takes
// a new wait descriptor under load, adds to a round, and not to each of them; what f
// itself allocates is in all.
func PerRun(runs int, f func()) float64 {
	least := testing.AllocsPerRun(runs, f)
	for range rounds - 1 {
		if least == 0 {
			break
		}
		least = min(least, testing.AllocsPerRun(runs, f))
	}
	return least
}
