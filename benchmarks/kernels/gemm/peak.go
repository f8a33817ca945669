//go:build unix

package main

import "time"

// fmaPeak returns the GFLOP/s of one thread in a loop of independent FMAs that runs for some
// milliseconds. A shorter loop before it wakes the vector units.
func fmaPeak() float64 {
	const loops = 5_000_000
	fmaLoop(loops / 10)
	start := time.Now()
	flops := fmaLoop(loops)
	return flops / time.Since(start).Seconds() / 1e9
}
