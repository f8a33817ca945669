package main

import "time"

// fmaPeak returns the GFLOP/s of one thread in a loop of independent FMAs.
func fmaPeak() float64 {
	const loops = 200_000
	start := time.Now()
	flops := fmaLoop(loops)
	return flops / time.Since(start).Seconds() / 1e9
}
