package gemm

import "github.com/spillway-ml/spillway/kernels/cpu/level"

// Rounding names how sums of bf16 products round at the current level on this CPU, or,
// portable, those of Spec.Portable. Two machines of one name compute the same bits; of two
// names, they differ in the last bits of float32 sums. Products of other types have the same
// bits everywhere.
func Rounding(portable bool) string {
	switch k := bestKernels(BF16, portable, level.Current()); k.form {
	case formTiles:
		return "AMX"
	case formBF16:
		return "AVX512-BF16"
	default:
		return "float32"
	}
}

// Widened says that a product's sums are those of float32 inputs at the level in
// use, bit for bit: of f32 and f16 always, of bf16 where no instruction for it is
// used.
func Widened(in Type) bool {
	k := bestKernels(in, false, level.Current())
	return k.form == formF32 || k.form == formWide
}
