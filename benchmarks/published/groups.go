package main

import (
	"math"
	"slices"

	"github.com/spillway-ml/spillway/internal/published"
)

// quantile interpolates linearly between the sorted values; NaN if there are none.
func quantile(v []float64, q float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	s := slices.Sorted(slices.Values(v))
	at := q * float64(len(s)-1)
	lo := int(at)
	if lo+1 >= len(s) {
		return s[len(s)-1]
	}
	return s[lo] + (at-float64(lo))*(s[lo+1]-s[lo])
}

// group is the rows of one stack on one card, or on all cards (Card is "").
type group struct {
	Stack, Card       string
	Calibration, Held int
	// Least and Most are the ratios of all rows; Raw is the median of |ratio − 1| of held-out ones.
	Least, Most, Raw float64
	// Median and P90 are of |published over calibrated time − 1|, of held-out rows.
	Median, P90 float64
	// Within counts held-out rows in the 80 % interval of their calibration, InRange those in the
	// range over all stacks of their card.
	Within, InRange int
}

// groupsOf compares predictions and published runs by stack and card, and by stack where it has
// several cards.
func groupsOf(rows []published.Row, generation func(card string) string) (list []group) {
	for _, stack := range published.Stacks {
		var cards []string
		for i := range rows {
			if r := &rows[i]; r.Stack == stack && !slices.Contains(cards, r.Card) {
				cards = append(cards, r.Card)
			}
		}
		if len(cards) > 1 {
			cards = append(cards, "")
		}
		for _, card := range cards {
			list = append(list, groupOf(rows, stack, card, generation))
		}
	}
	return list
}

func groupOf(rows []published.Row, stack, card string, generation func(card string) string) group {
	g := group{Stack: stack, Card: card, Least: math.Inf(1)}
	var raw, fitted []float64
	fits := map[string]*published.Fit{}
	for i := range rows {
		r := &rows[i]
		if r.Stack != stack || card != "" && r.Card != card {
			continue
		}
		ratio := r.Ratio()
		g.Least, g.Most = min(g.Least, ratio), max(g.Most, ratio)
		if r.Calibration {
			g.Calibration++
			continue
		}
		g.Held++
		if fits[r.Card] == nil {
			fits[r.Card] = published.FitIn(rows, stack, r.Card, generation)
		}
		in := published.RangeOf([]*published.Fit{fits[r.Card]}, r.Here.Parts)
		if in.Low <= ratio && ratio <= in.High {
			g.Within++
		}
		if all := published.RangeOf(published.FitsIn(rows, r.Card, generation), r.Here.Parts); all.Low <= ratio && ratio <= all.High {
			g.InRange++
		}
		raw, fitted = append(raw, math.Abs(ratio-1)), append(fitted, math.Abs(ratio/in.Middle-1))
	}
	g.Raw, g.Median, g.P90 = quantile(raw, 0.5), quantile(fitted, 0.5), quantile(fitted, 0.9)
	return g
}
