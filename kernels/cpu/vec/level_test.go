package vec

import "github.com/spillway-ml/spillway/kernels/cpu/level"

// useLevel makes the kernels use a level and returns a function that restores the previous one.
// Tests that call it must not run in parallel.
func useLevel(l level.Level) (restore func()) {
	old := simd
	simd = &tables[l]
	return func() { simd = old }
}
