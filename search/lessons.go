package search

import "math"

// lessons correct the estimates of a base's mixes by what its plans differed by from theirs: kernel
// ridge regression. The kernel of two mixes is the weighted Jaccard similarity of what they move
// (features.overlap), which is positive definite.
type lessons struct {
	weight []float64 // bytes that each move frees, at least 1
	of     []lesson
	lower  [][]float64 // the Cholesky factor of the lessons' kernel matrix, by row
	solved []offBy     // that matrix's inverse times the lessons' errors
}

const (
	mostLessons = 128  // of a base
	lessonNoise = 0.01 // on the diagonal: mixes that are nearly equal have nearly equal lessons
)

// seen is a mix that was planned.
type seen struct {
	x mix
	m *measured
}

// offBy is the difference between a plan and its estimate.
type offBy struct {
	freed float64 // bytes of device memory
	time  float64 // as a part of the estimated time of a step
}

type lesson struct {
	features
	offBy
}

// features are the moves that a mix makes, in order, the bytes of each by move, and their sum.
type features struct {
	moves []int
	bytes []float64
	sum   float64
}

func newLessons(set *moveSet) *lessons {
	l := &lessons{}
	for i := range set.moves {
		l.weight = append(l.weight, max(1, set.moves[i].bytes))
	}
	return l
}

func (l *lessons) features(x mix) features {
	f := features{moves: make([]int, 0, len(x)), bytes: make([]float64, len(x))}
	for i, share := range x {
		if share > 0 {
			f.bytes[i] = float64(share * l.weight[i])
			f.moves, f.sum = append(f.moves, i), f.sum+f.bytes[i]
		}
	}
	return f
}

// overlap returns the bytes that both mixes move, divided by those that at least one moves.
func (f *features) overlap(g *features) float64 {
	both := 0.0
	for _, i := range f.moves {
		both += min(f.bytes[i], g.bytes[i])
	}
	if either := f.sum + g.sum - both; either > 0 {
		return both / either
	}
	return 1 // neither moves anything
}

// factor computes the missing rows of the Cholesky factor.
func (l *lessons) factor() {
	for i := len(l.lower); i < len(l.of); i++ {
		row := make([]float64, i+1)
		l.lower = append(l.lower, row)
		for k := range row {
			v := l.of[i].overlap(&l.of[k].features)
			for j, c := range l.lower[k][:k] {
				v -= float64(row[j] * c)
			}
			if k < i {
				row[k] = v / l.lower[k][k]
			} else {
				row[k] = math.Sqrt(v + lessonNoise)
			}
		}
	}
}

// solve substitutes forward and back.
func (l *lessons) solve() {
	n := len(l.of)
	y := make([]offBy, n)
	for i := range n {
		y[i] = l.of[i].offBy
		for k, c := range l.lower[i][:i] {
			y[i].less(c, y[k])
		}
		y[i].by(l.lower[i][i])
	}
	for i := n - 1; i >= 0; i-- {
		for k := i + 1; k < n; k++ {
			y[i].less(l.lower[k][i], y[k])
		}
		y[i].by(l.lower[i][i])
	}
	l.solved = y
}

func (o *offBy) less(c float64, p offBy) {
	o.freed -= float64(c * p.freed)
	o.time -= float64(c * p.time)
}

func (o *offBy) by(c float64) { o.freed, o.time = o.freed/c, o.time/c }

// correct returns the expected errors of a mix's estimates.
func (l *lessons) correct(x mix) (off offBy) {
	if len(l.of) == 0 {
		return off
	}
	at := l.features(x)
	for i := range l.of {
		off.less(-at.overlap(&l.of[i].features), l.solved[i])
	}
	return off
}
