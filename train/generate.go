package train

import (
	"math"
	"math/rand/v2"
	"slices"
	"sort"
	"unicode/utf8"

	"github.com/spillway-ml/spillway/config"
)

// Sampling says how the next token is drawn.
type Sampling struct {
	Temperature float64 // divides the logits; 0 chooses the likeliest token
	TopK        int     // only the k likeliest are considered; 0: all
	TopP        float64 // only the likeliest whose probabilities, summed in order, reach p (Holtzman et al. 2019); 0 or 1: all
	Seed        uint64
}

// Validate returns an error that names the first invalid field.
func (s Sampling) Validate() error {
	switch {
	case !(s.Temperature >= 0) || math.IsInf(s.Temperature, 1):
		return config.Refuse("Sampling.Temperature %g: a number of at least 0 is needed; 0 takes the likeliest token", s.Temperature)
	case s.TopK < 0:
		return config.Refuse("Sampling.TopK %d: at least 1 token is needed, or 0 to consider all", s.TopK)
	case !(s.TopP >= 0 && s.TopP <= 1):
		return config.Refuse("Sampling.TopP %g: a probability is needed, over 0 and at most 1", s.TopP)
	}
	return nil
}

// wholeRunes returns how many bytes of b remain without an incomplete character at the end, which
// later bytes may complete.
func wholeRunes(b []byte) int {
	for i := 1; i < utf8.UTFMax && i <= len(b); i++ {
		if c := b[len(b)-i]; utf8.RuneStart(c) {
			if !utf8.FullRune(b[len(b)-i:]) {
				return len(b) - i
			}
			break
		}
	}
	return len(b)
}

// pick draws a token from the softmax of logits. Of equal logits the smaller token comes first.
func (s Sampling) pick(logits []float32, rng *rand.Rand) int32 {
	if s.Temperature <= 0 {
		best := 0
		for i, v := range logits {
			if v > logits[best] {
				best = i
			}
		}
		return int32(best)
	}
	order := likeliest(logits, s.TopK)
	top := float64(logits[order[0]])
	weights, sum := make([]float64, len(order)), 0.0
	for i, tok := range order {
		weights[i] = math.Exp((float64(logits[tok]) - top) / s.Temperature)
		sum += weights[i]
	}
	if s.TopP > 0 && s.TopP < 1 {
		kept, reached := 0, 0.0
		for kept < len(weights) && reached < s.TopP*sum {
			reached += weights[kept]
			kept++
		}
		order, weights, sum = order[:kept], weights[:kept], reached
	}
	u := rng.Float64() * sum
	for i, w := range weights {
		if u -= w; u < 0 {
			return order[i]
		}
	}
	return order[len(order)-1]
}

// likeliest returns the k tokens with the highest logits, highest first; k = 0 means all.
func likeliest(logits []float32, k int) []int32 {
	order := make([]int32, 0, len(logits))
	before := func(a, b int32) int {
		switch x, y := logits[a], logits[b]; {
		case x > y:
			return -1
		case x < y:
			return 1
		}
		return 0
	}
	if k <= 0 || k >= len(logits) {
		for i := range logits {
			order = append(order, int32(i))
		}
		slices.SortStableFunc(order, before)
		return order
	}
	for i := range int32(len(logits)) {
		if len(order) == k {
			if before(i, order[k-1]) >= 0 {
				continue
			}
			order = order[:k-1]
		}
		at := sort.Search(len(order), func(j int) bool { return before(i, order[j]) < 0 })
		order = slices.Insert(order, at, i)
	}
	return order
}

// logProb returns the natural logarithm of a token's softmax probability.
func logProb(logits []float32, token int32) float64 {
	top := float64(slices.Max(logits))
	sum := 0.0
	for _, v := range logits {
		sum += math.Exp(float64(v) - top)
	}
	return float64(logits[token]) - top - math.Log(sum)
}
