package vec

import "github.com/spillway-ml/spillway/kernels/cpu/level"

// useLevel makes the kernels use a level; the result restores the one before.
// Tests that call it do not run in parallel.
func useLevel(l level.Level) (restore func()) {
	old := simd
	simd = &tables[l]
	return func() { simd = old }
}
