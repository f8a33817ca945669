package published

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// Fit is how long the runs of one stack took, by what the predicted time consists of. It is
// fitted to calibration rows alone.
type Fit struct {
	Stack string
	Cards []string // of the rows, in name order
	Rows  int
	// Elsewhere says that no row is of the card or its generation, or too few are.
	Elsewhere bool
	// Of is the published time per predicted time in matrix products, attention, other
	// computation and waiting.
	Of [4]float64
	// Low and High are the 80 % interval of published over fitted times: the residuals of each
	// row when the others alone are fitted.
	Low, High float64
}

// ridge is the weight of the pull of Fit.Of towards one factor for all parts, in rows. It was
// chosen among 0.01 to 30 by the residuals of calibration rows: of 40 rows of torch on a100-40,
// nine in ten are within 15 % with 0.01 and within 24 % with one factor.
const ridge = 0.01

// parts are the shares of a predicted time, waiting last.
func (p Parts) parts() [4]float64 {
	return [4]float64{p.Products, p.Attention, p.Other, max(0, 1-p.Products-p.Attention-p.Other)}
}

// Scale is the fitted time over the predicted one.
func (f *Fit) Scale(p Parts) (scale float64) {
	for k, v := range p.parts() {
		scale += float64(v * f.Of[k])
	}
	return scale
}

// FitOf fits a stack's calibration rows of a card; where there are fewer than two, those of the
// card's generation, or else of all cards. nil: the stack has no rows.
func FitOf(stack, card string, generation func(card string) string) *Fit {
	return FitIn(Rows(), stack, card, generation)
}

// FitIn is FitOf for the given rows.
func FitIn(rows []Row, stack, card string, generation func(card string) string) *Fit {
	for rung := range rungs {
		if f := fitOn(rows, rung, stack, card, generation); f != nil {
			return f
		}
	}
	return nil
}

// FitsOf fits every stack with rows of the card; where there is none, every stack with rows of
// its generation, or else every stack.
func FitsOf(card string, generation func(card string) string) []*Fit {
	return FitsIn(Rows(), card, generation)
}

// FitsIn is FitsOf for the given rows. Stacks with two rows are left out where others have more: an
// interval of so few says little of the stack.
func FitsIn(rows []Row, card string, generation func(card string) string) (fits []*Fit) {
	for rung := range rungs {
		for _, stack := range Stacks {
			if f := fitOn(rows, rung, stack, card, generation); f != nil {
				fits = append(fits, f)
			}
		}
		if few := func(f *Fit) bool { return f.Rows < 3 }; slices.ContainsFunc(fits, func(f *Fit) bool { return !few(f) }) {
			fits = slices.DeleteFunc(fits, few)
		}
		if fits != nil {
			return fits
		}
	}
	return nil
}

// enough rows are those whose least and most hold a further one with probability 0.8.
const enough = 9

// rungs are a card's own rows, those of its generation, and all.
const rungs = 3

// fitOn fits a stack's calibration rows of one rung; nil: there are fewer than two.
func fitOn(rows []Row, rung int, stack, card string, generation func(card string) string) *Fit {
	var chosen []*Row
	for k := range rows {
		r := &rows[k]
		of := rung == 2 || r.Card == card || rung == 1 && generation(r.Card) == generation(card)
		if r.Calibration && r.Stack == stack && of {
			chosen = append(chosen, r)
		}
	}
	if len(chosen) < 2 {
		return nil
	}
	f := fit(chosen)
	f.Stack, f.Elsewhere = stack, rung == 2
	return f
}

// fit is the least-squares fit of the relative errors, with its interval.
func fit(rows []*Row) *Fit {
	f := &Fit{Rows: len(rows), Of: factors(rows)}
	var residuals []float64
	for i, r := range rows {
		others := &Fit{Of: factors(slices.Delete(slices.Clone(rows), i, i+1))}
		residuals = append(residuals, r.Ratio()/others.Scale(r.Here.Parts))
		if !slices.Contains(f.Cards, r.Card) {
			f.Cards = append(f.Cards, r.Card)
		}
	}
	slices.Sort(f.Cards)
	slices.Sort(residuals)
	f.Low, f.High = interval(residuals)
	return f
}

// interval holds a further value with probability 0.8, if it is of the same kind as the sorted
// ones. Below nine values even the least and the most hold it more rarely, (n−1)/(n+1); it is
// Student's prediction interval there, by the same factor below the mean as above it.
func interval(sorted []float64) (low, high float64) {
	if n := float64(len(sorted)); len(sorted) < enough {
		mean, squares := 0.0, 0.0
		for _, v := range sorted {
			mean += v / n
		}
		for _, v := range sorted {
			squares += float64((v - mean) * (v - mean))
		}
		by := 1 + student[len(sorted)-2]*math.Sqrt(squares/(n-1)*(1+1/n))/mean
		return mean / by, float64(mean * by)
	}
	return quantile(sorted, 0.1), quantile(sorted, 0.9)
}

// student has the 90 % quantiles of Student's distribution for 1 to 7 degrees of freedom.
var student = [enough - 2]float64{3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415}

// quantile of a new value among nine and more that are sorted: the q-th of n + 1 places, between
// two of them by their distances.
func quantile(sorted []float64, q float64) float64 {
	at := float64(q*float64(len(sorted)+1)) - 1
	i := min(int(at), len(sorted)-2)
	return sorted[i] + float64((at-float64(i))*(sorted[i+1]-sorted[i]))
}

// factors are Fit.Of, none below 0. With x the predicted seconds of a part per published second,
// they minimize the sum over rows of (1 − Σ factor·x)², and ridge times the squared distances from the
// median ratio.
func factors(rows []*Row) (of [4]float64) {
	var ratios []float64
	var a [4][5]float64
	for _, r := range rows {
		ratio := r.Ratio()
		ratios = append(ratios, ratio)
		x := r.Here.parts()
		for i := range x {
			for j := range x {
				a[i][j] += float64(x[i] / ratio * (x[j] / ratio))
			}
			a[i][4] += x[i] / ratio
		}
	}
	slices.Sort(ratios)
	median := (ratios[(len(ratios)-1)/2] + ratios[len(ratios)/2]) / 2
	for i := range a {
		a[i][i] += ridge
		a[i][4] += float64(ridge * median)
	}
	// No part takes less than no time: the lowest factor below 0 is 0 instead.
	for {
		of = solve(a)
		k := slices.Index(of[:], slices.Min(of[:]))
		if of[k] >= 0 {
			return of
		}
		for i := range a {
			a[i][k], a[k][i] = 0, 0
		}
		a[k][k], a[k][4] = 1, 0
	}
}

// solve returns the x with a·x = the last column, by elimination: the matrix is positive definite,
// so it needs no pivots.
func solve(a [4][5]float64) (x [4]float64) {
	for i := range a {
		for k := i + 1; k < 4; k++ {
			by := a[k][i] / a[i][i]
			for j := i; j < 5; j++ {
				a[k][j] -= float64(by * a[i][j])
			}
		}
	}
	for i := 3; i >= 0; i-- {
		v := a[i][4]
		for j := i + 1; j < 4; j++ {
			v -= float64(a[i][j] * x[j])
		}
		x[i] = v / a[i][i]
	}
	return x
}

// Range is what published runs say of a predicted time: they take Low to High times as long.
type Range struct {
	Low, High float64
	// Middle is the calibrated time of one stack over the predicted one; 0: the range is of
	// several stacks.
	Middle    float64
	Rows      int      // behind the range
	Stacks    []string // of those rows
	Cards     []string // of those rows, in name order
	Elsewhere bool     // as in Fit
}

// RangeOf is the range of all fits for a plan of the given parts: the least to the most of their
// 80 % intervals, which of several stacks are rounded outwards to two digits.
func RangeOf(fits []*Fit, p Parts) Range {
	r := Range{Low: 1, High: 1}
	for i, f := range fits {
		s := f.Scale(p)
		if i == 0 {
			r.Low, r.High, r.Middle, r.Elsewhere = s*f.Low, s*f.High, s, f.Elsewhere
		}
		r.Low, r.High = min(r.Low, s*f.Low), max(r.High, s*f.High)
		r.Rows += f.Rows
		r.Stacks, r.Cards = append(r.Stacks, f.Stack), append(r.Cards, f.Cards...)
	}
	slices.Sort(r.Cards)
	r.Cards = slices.Compact(r.Cards)
	if len(fits) > 1 {
		r.Middle, r.Low, r.High = 0, float64(int(100*r.Low))/100, float64(int(100*r.High)+1)/100
	}
	return r
}

// Text is the range in words, with the runs that it comes from.
func (r Range) Text() string {
	if r.Middle > 0 {
		on := strings.Join(r.Cards, ", ")
		if r.Elsewhere {
			on += "; too few are known of this generation"
		}
		return fmt.Sprintf("calibrated to %d published runs of %s (on %s), which makes it %.2f times the rates' prediction; "+
			"80 %% of such runs are expected at %.2f to %.2f times",
			r.Rows, r.Stacks[0], on, r.Middle, r.Low, r.High)
	}
	on := "published runs"
	if r.Elsewhere {
		on = "no published run of this generation is known; published runs on others"
	}
	return fmt.Sprintf("%s (%d, of %s) took %.2f to %.2f times as long as predicted", on, r.Rows, strings.Join(r.Stacks, ", "), r.Low, r.High)
}
