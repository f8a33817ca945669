package train

import (
	"math"

	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/exact"
	"github.com/spillway-ml/spillway/train/saving"
)

// noiseSteps is the number of steps that an estimate averages.
const noiseSteps = 32

var unknownNoise = Noise{math.NaN(), math.NaN(), math.NaN(), math.NaN()}

// noise estimates the noise scale after a step of the given rows, from its gradient's norm and the
// squares of its leaves, which are multiplied by the loss scale.
func (t *Trainer) noise(rows int, counted data.Counted, norm, lossScale float64) (Noise, error) {
	port := t.ports[graph.PortSquares]
	if port == graph.NoBuf || !isFinite(norm) {
		return unknownNoise, nil
	}
	limbs, err := t.ranks.First().Exec.HostI64(port)
	if err != nil {
		return unknownNoise, err
	}
	m, ok := momentsOf(rows, counted, norm*norm, exact.Accumulator(limbs).Float64()/lossScale/lossScale)
	if !ok {
		return unknownNoise, nil
	}
	// Append to a new list: a checkpoint that is being written keeps the old list.
	last := t.at.Noise[max(0, len(t.at.Noise)+1-noiseSteps):]
	t.at.Noise = append(append(make([]saving.Moments, 0, noiseSteps), last...), m)
	n := Noise{Square: m.Square, Trace: m.Trace}
	n.Scale, n.Error = noiseScale(t.at.Noise)
	return n, nil
}

// momentsOf estimates |G|² and tr(Σ) from the squared norm of a step's gradient and the sum of its
// leaves' squared norms. Leaf i has a share wᵢ of the step's targets and is wᵢ times the mean
// gradient of its targets. For a step of B rows this gives
//
//	E |Σ leaves|² = |G|² + tr(Σ)/B,   E Σ |leaf|² = q |G|² + tr(Σ)/B,   q = Σ wᵢ²
//
// ok is false if there is only one leaf, or if a value is not finite.
func momentsOf(rows int, counted data.Counted, whole, leaves float64) (m saving.Moments, ok bool) {
	q := counted.Squares / float64(counted.All) / float64(counted.All)
	m.Square = (whole - leaves) / (1 - q)
	m.Trace = float64(rows) * (leaves - q*whole) / (1 - q)
	return m, q < 1 && isFinite(m.Square) && isFinite(m.Trace)
}

// noiseScale returns the ratio of the mean trace to the mean square of steps, and its standard
// error, which is that of a ratio of means (Cochran, Sampling Techniques, 1977, 6.4):
//
//	√(Σ (traceₖ − scale·squareₖ)² / (n (n−1))) / mean square
//
// Both are NaN if the mean square is not above 0. The error is NaN for one step.
func noiseScale(steps []saving.Moments) (scale, err float64) {
	n := float64(len(steps))
	var square, trace, apart float64
	for _, m := range steps {
		square += m.Square / n
		trace += m.Trace / n
	}
	if !(square > 0) {
		return math.NaN(), math.NaN()
	}
	scale = trace / square
	for _, m := range steps {
		d := m.Trace - scale*m.Square
		apart += d * d
	}
	return scale, math.Sqrt(apart/(n*(n-1))) / square // one step: 0/0
}
