//go:build unix

package main

import "github.com/spillway-ml/spillway/kernels/cpu/level"

// fma512 and fma256 run 16 and 12 independent FMAs of their width n times.
//
//go:noescape
func fma512(n int)

//go:noescape
func fma256(n int)

func fmaLoop(n int) (flops float64) {
	switch level.Current() {
	case level.AVX512:
		fma512(n)
		return float64(n) * 16 * 32
	case level.AVX2:
		fma256(n)
		return float64(n) * 12 * 16
	}
	return 0
}
