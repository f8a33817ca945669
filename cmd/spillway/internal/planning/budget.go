package planning

import (
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/planner"
)

// mostBudget bounds --tokens and --price, so that their product is a float64.
const mostBudget = 1e100

// checkBudget rejects invalid --tokens and --price.
func (f *Flags) checkBudget() error {
	switch {
	case !(f.tokens == 0 || f.tokens >= 1 && f.tokens <= mostBudget):
		return fmt.Errorf("--tokens %g: a number of tokens is needed, as in 100e9", f.tokens)
	case !(f.price >= 0 && f.price <= mostBudget):
		return fmt.Errorf("--price %g: money for a GPU-hour is needed", f.price)
	case f.price > 0 && f.tokens == 0:
		return errors.New("--price is for the cost of a whole run; give --tokens too")
	}
	return nil
}

// budget returns the predicted time and cost of training on --tokens tokens; nil without --tokens.
func (f *Flags) budget(p *planner.Forecast) *Budget {
	if f.tokens == 0 {
		return nil
	}
	b := &Budget{Tokens: f.tokens}
	times := [2]float64{1, 1}
	if r := f.timeRange(p); r != nil {
		times = [2]float64{r.Low, r.High}
	}
	for i, by := range times {
		hours := by * p.Seconds(f.tokens) / 3600
		b.Days[i], b.RankHours[i] = hours/24, hours*float64(p.Config.Ranks)
		if f.price > 0 {
			b.Cost = append(b.Cost, b.RankHours[i]*f.price)
		}
	}
	return b
}

// budgetText formats the budget as a line; "" without --tokens.
func (f *Flags) budgetText(p *planner.Forecast) string {
	b := f.budget(p)
	if b == nil {
		return ""
	}
	short := func(v float64) string {
		if v = rough(v); v < 10 || v >= 1e15 {
			return fmt.Sprintf("%.2g", v)
		}
		return grouped(int64(v))
	}
	unit := "rank-hours"
	if f.gpuFound != nil {
		unit = "GPU-hours"
	}
	of := func(v []float64) string { return between(short(v[0]), short(v[1])) }
	take := inWords(b.Tokens) + " tokens take"
	if take == "1 tokens take" {
		take = "1 token takes"
	}
	text := fmt.Sprintf("%s %s days and %s %s", take, of(b.Days[:]), of(b.RankHours[:]), unit)
	if f.price > 0 {
		text += fmt.Sprintf(", which cost %s at --price %g", of(b.Cost), f.price)
	}
	return text
}
