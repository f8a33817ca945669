package main

import (
	"math"
	"slices"

	"github.com/spillway-ml/spillway/internal/published"
)

// quantile interpolates linearly between the sorted values.
func quantile(v []float64, q float64) float64 {
	s := slices.Sorted(slices.Values(v))
	at := q * float64(len(s)-1)
	lo := int(at)
	if lo+1 >= len(s) {
		return s[len(s)-1]
	}
	return s[lo] + (at-float64(lo))*(s[lo+1]-s[lo])
}

// group is the rows of one stack on one card in one role.
type group struct {
	Stack, Card string
	Calibration bool
	Projects    []string
	N           int
	Mean        float64 // geometric mean of the ratios
	Least, Most float64 // ratios
	// Error is the median of |ratio − 1|. Scaled is the same after dividing by the mean ratio of
	// the calibration rows of that stack and card; NaN if there are none.
	Error, Scaled float64
	Within        int // rows whose published time lies in the card's range
}

// groupsOf compares predictions and published runs by group, in the order of the rows.
func groupsOf(rows []published.Row, generation func(card string) string) (list []group) {
	type key struct {
		stack, card string
		calibration bool
	}
	of := map[key][]*published.Row{}
	var order []key
	for i := range rows {
		r := &rows[i]
		k := key{r.Stack, r.Card, r.Calibration}
		if of[k] == nil {
			order = append(order, k)
		}
		of[k] = append(of[k], r)
	}
	mean := func(list []*published.Row) float64 {
		sum := 0.0
		for _, r := range list {
			sum += math.Log(r.Ratio())
		}
		return math.Exp(sum / float64(len(list)))
	}
	for _, k := range order {
		g := group{Stack: k.stack, Card: k.card, Calibration: k.calibration, N: len(of[k]), Mean: mean(of[k]), Least: math.Inf(1), Scaled: math.NaN()}
		within := published.RangeIn(rows, k.card, generation)
		scale := mean(of[key{k.stack, k.card, true}])
		var off, scaled []float64
		for _, r := range of[k] {
			ratio := r.Ratio()
			g.Least, g.Most = min(g.Least, ratio), max(g.Most, ratio)
			off, scaled = append(off, math.Abs(ratio-1)), append(scaled, math.Abs(ratio/scale-1))
			if within.Low <= ratio && ratio <= within.High {
				g.Within++
			}
			if !slices.Contains(g.Projects, r.Project) {
				g.Projects = append(g.Projects, r.Project)
			}
		}
		g.Error = quantile(off, 0.5)
		if !math.IsNaN(scale) {
			g.Scaled = quantile(scaled, 0.5)
		}
		list = append(list, g)
	}
	return list
}
