// Package alloctest counts the allocations of a function, including those of other goroutines that
// work for it.
package alloctest

import "testing"

// rounds is the largest number of times that PerRun counts.
const rounds = 10

// PerRun is testing.AllocsPerRun, but returns the lowest count of several rounds. The count covers
// the process: an ending goroutine of an earlier test, or a new wait descriptor of the scheduler
// under load, adds to some rounds. Allocations of f itself are in all rounds.
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
