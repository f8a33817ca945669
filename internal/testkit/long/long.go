// Package long tells tests how much to run. The default suite takes minutes: small models and
// seeded samples. SPILLWAY_LONG=1 (make long) runs every case, except of grids that take hours, of
// which it runs larger samples. SPILLWAY_LONG=all (make campaigns) runs those completely.
package long

import (
	"hash/fnv"
	"math/rand/v2"
	"os"
	"testing"
)

// On reports whether every case is to be run.
func On() bool { return os.Getenv("SPILLWAY_LONG") == "1" || All() }

// All reports whether grids that take hours are to be run completely too.
func All() bool { return os.Getenv("SPILLWAY_LONG") == "all" }

// Only skips the test unless every case is to be run.
func Only(t testing.TB) {
	t.Helper()
	if !On() {
		t.Skip("SPILLWAY_LONG=1 runs it")
	}
}

// Or returns short in the default suite, and full if every case is to be run.
func Or[T any](short, full T) T {
	if On() {
		return full
	}
	return short
}

// Of returns short in the default suite, hour for make long, and all for make campaigns.
func Of[T any](short, hour, all T) T {
	if All() {
		return all
	}
	return Or(short, hour)
}

// Sample draws n cases with a seed and keeps their order. It returns all cases if every case is to
// be run.
func Sample[T any](seed uint64, n int, cases []T) []T {
	if On() {
		return cases
	}
	return Draw(seed, n, cases)
}

// Draw draws n cases with a seed and keeps their order.
func Draw[T any](seed uint64, n int, cases []T) []T {
	if n >= len(cases) {
		return cases
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	var drawn []T
	for i, c := range cases {
		if rng.IntN(len(cases)-i) < n-len(drawn) {
			drawn = append(drawn, c)
		}
	}
	return drawn
}

// Keep reports whether to run the case of that name: about one in oneIn, by a hash of the name, or
// every one if every case is to be run.
func Keep(name string, oneIn uint64) bool {
	h := fnv.New64a()
	h.Write([]byte(name))
	return On() || rand.New(rand.NewPCG(h.Sum64(), 0)).Uint64N(oneIn) == 0
}
