package published

import (
	"fmt"
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
	same := func(r *Row) bool { return r.Card == card }
	akin := func(r *Row) bool { return generation(r.Card) == generation(card) }
	all := func(*Row) bool { return true }
	for i, of := range []func(*Row) bool{same, akin, all} {
		var chosen []*Row
		for k := range rows {
			if r := &rows[k]; r.Calibration && r.Stack == stack && of(r) {
				chosen = append(chosen, r)
			}
		}
		if len(chosen) >= 2 {
			f := fit(chosen)
			f.Stack, f.Elsewhere = stack, i == 2
			return f
		}
	}
	return nil
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
	f.Low, f.High = quantile(residuals, 0.1), quantile(residuals, 0.9)
	return f
}

// quantile of a new value among the sorted ones: the q-th of n + 1 places, between two of them by
// their distances, and no further than the ends.
func quantile(sorted []float64, q float64) float64 {
	at := max(0, min(float64(len(sorted)-1), float64(q*float64(len(sorted)+1))-1))
	i := min(int(at), len(sorted)-2)
	if i < 0 {
		return sorted[0]
	}
	return sorted[i] + float64((at-float64(i))*(sorted[i+1]-sorted[i]))
}

// factors are Fit.Of. With x the predicted seconds of a part per published second, they
// minimize the sum over rows of (1 − Σ factor·x)², and ridge times the squared distances from the
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
	// Gauss: the matrix is positive definite, so no pivots are needed.
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
			v -= float64(a[i][j] * of[j])
		}
		of[i] = v / a[i][i]
	}
	return of
}

// Range is the fit for a plan of the given parts, with its 80 % interval.
func (f *Fit) Range(p Parts) Range {
	s := f.Scale(p)
	r := Range{Low: s * f.Low, High: s * f.High, Middle: s, Rows: f.Rows, Stacks: []string{f.Stack}, Elsewhere: f.Elsewhere}
	on := strings.Join(f.Cards, ", ")
	if f.Elsewhere {
		on += "; too few are known of this generation"
	}
	r.says = fmt.Sprintf("calibrated to %d published runs of %s (on %s), which makes it %.2f times the rates' prediction; 80 %% of such runs are expected at %.2f to %.2f times", f.Rows, f.Stack, on, s, r.Low, r.High)
	return r
}
