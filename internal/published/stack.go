package published

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// Fit predicts the time that one stack takes from the parts of a predicted time. It is fitted to
// calibration rows only.
type Fit struct {
	Stack string
	Cards []string // of those rows, in name order
	Rows  int
	// Elsewhere is set if fewer than two rows are of the card or its generation, so that rows of
	// all cards are used.
	Elsewhere bool
	// Of is the published time per predicted time of each part: matrix products, attention, other
	// computation, waiting.
	Of [4]float64
	// Low and High bound the 80 % interval of published time divided by fitted time. It is computed
	// from leave-one-out residuals: each row is compared with a fit of the others.
	Low, High float64
}

// ridge is the weight, in rows, of the penalty that pulls Fit.Of towards one factor for all parts.
// It was chosen from 0.01 to 30 by the residuals of calibration rows. With 0.01, 90 % of 40 torch
// rows on a100-40 are within 15 %; with one factor, 90 % are within 24 %.
const ridge = 0.01

// parts returns the shares of a predicted time; the last is waiting.
func (p Parts) parts() [4]float64 {
	return [4]float64{p.Products, p.Attention, p.Other, max(0, 1-p.Products-p.Attention-p.Other)}
}

// Scale returns the fitted time divided by the predicted time.
func (f *Fit) Scale(p Parts) (scale float64) {
	for k, v := range p.parts() {
		scale += float64(v * f.Of[k])
	}
	return scale
}

// FitOf fits a stack's calibration rows on a card. If there are fewer than two, it uses rows of the
// card's generation, else of all cards. It returns nil if the stack has fewer than two rows.
func FitOf(stack, card string, generation func(card string) string) *Fit {
	return FitIn(Rows(), stack, card, generation)
}

// FitIn is like FitOf, for the given rows.
func FitIn(rows []Row, stack, card string, generation func(card string) string) *Fit {
	for rung := range rungs {
		if f := fitOn(rows, rung, stack, card, generation); f != nil {
			return f
		}
	}
	return nil
}

// FitsOf fits every stack that has at least two rows on the card. If there is none, it fits stacks
// with rows of the card's generation, else with rows of any card.
func FitsOf(card string, generation func(card string) string) []*Fit {
	return FitsIn(Rows(), card, generation)
}

// FitsIn is like FitsOf, for the given rows. It omits stacks with two rows if another stack has
// more: an interval from two rows says little.
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

// enough is the number of rows whose smallest and largest bound a further one with probability 0.8.
const enough = 9

// rungs is the number of row sets to try: rows of the card, of its generation, of all cards.
const rungs = 3

// fitOn fits a stack's calibration rows of one rung: 0 for the card, 1 for its generation, 2 for
// all cards. It returns nil if there are fewer than two.
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

// fit returns the least-squares fit of the relative errors, with its interval.
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

// interval returns bounds that contain a further value of the same distribution with probability
// 0.8. With fewer than nine values, even the smallest and largest contain it only with probability
// (n−1)/(n+1): then interval uses Student's prediction interval, with the same factor below the mean as
// above it. sorted is ascending.
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

// student lists the 90 % quantiles of Student's distribution for 1 to 7 degrees of freedom.
var student = [enough - 2]float64{3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415}

// quantile returns the q-quantile of a further value, given at least nine sorted values. It
// interpolates linearly at position q·(n+1).
func quantile(sorted []float64, q float64) float64 {
	at := float64(q*float64(len(sorted)+1)) - 1
	i := min(int(at), len(sorted)-2)
	return sorted[i] + float64((at-float64(i))*(sorted[i+1]-sorted[i]))
}

// factors returns Fit.Of, none below 0. With x the predicted seconds of a part per published
// second, they minimize the sum over rows of (1 − Σ factor·x)², plus ridge times the sum of (factor
// − median ratio)².
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
	// No part takes negative time: set the lowest negative factor to 0 and solve again.
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

// solve returns x with a·x equal to the last column, by Gaussian elimination. The matrix is
// positive definite, so it needs no pivoting.
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

// Range compares published runs with a predicted time: they take Low to High times as long.
type Range struct {
	Low, High float64
	// Middle is the calibrated time of one stack divided by the predicted time; 0 for several
	// stacks.
	Middle    float64
	Rows      int      // used for the range
	Stacks    []string // of those rows
	Cards     []string // of those rows, in name order
	Elsewhere bool     // as in Fit
}

// RangeOf returns the range that covers the 80 % intervals of all fits, for a plan with the given
// parts. For several stacks it is rounded outwards to two decimals.
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

// Text formats the range, with the runs on which it is based.
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
