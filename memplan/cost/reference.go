package cost

// Formulas from the literature, for comparison with plans. No plan uses them.

// MegatronActivationBytes returns the bytes of a decoder's activations in 16 bits by
// Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
// Models" (2022), section 4.1, equation 1: sbh(34 + 5as/h) bytes a layer without
// parallelism within a layer. It assumes that dropout masks (a byte an element)
// and the attention's a·s² scores, their softmax and its dropped copy are kept.
// With selective, the attention's activations are recomputed (section 5): 34sbh.
// s is the tokens of a row, b the rows of a micro-batch, h the width and a the heads.
func MegatronActivationBytes(layers, s, b, h, a float64, selective bool) float64 {
	perLayer := float64(34 * s * b * h)
	if !selective {
		perLayer += float64(5 * a * s * s * b)
	}
	return layers * perLayer
}
