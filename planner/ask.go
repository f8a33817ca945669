package planner

import (
	"context"
	"errors"

	"github.com/spillway-ml/spillway/search"
)

// Question asks for the value at which a job begins to fit, or ceases to.
type Question struct {
	// Count is how many values there are, in an order in which more of them is either
	// always easier or always harder to fit.
	Count int
	// Easier says that later values need less of the memory: the first that fits is asked
	// for. Otherwise it is the last.
	Easier bool
	// At is the job and its hardware at a value, from 0.
	At func(i int) (Request, Hardware)
	// Fixed and Rows are Fit's.
	Fixed Fixed
	Rows  int
}

// Answer is a value that fits and its neighbour, which does not.
type Answer struct {
	Value int     // its number; −1: nothing fits
	Best  *Fitted // the fastest of it; nil: nothing fits
	// Neighbour is the number of the value that doesn't fit; −1: there is none, for all do.
	Neighbour int
	None      *NothingFits // of the neighbour
	Looked    int          // values that were looked at
}

// AskEffort is the effort of each of the searches that an answer takes, where the
// Hardware has none: an answer says that something fits, and need not be the fastest.
const AskEffort = 100

// Ask answers a question. What is not fixed is free, as in Fit, and the answer is what
// Fit finds: the value is confirmed by a plan that fits, its neighbour by a search that
// finds none.
func Ask(ctx context.Context, q Question) (*Answer, error) {
	a := &asking{q: q, known: map[int]bool{}}
	low, high, err := a.bracket(ctx)
	if err != nil {
		return nil, err
	}
	// Bounds may promise what placement does not keep: the search has the last word.
	yes, no := low, high
	if q.Easier {
		yes, no = high, low
	}
	step := 1
	if q.Easier {
		step = -1
	}
	out := &Answer{Value: -1, Neighbour: -1}
	for inside(yes, q.Count) {
		best, none, err := a.fit(ctx, yes)
		if err != nil {
			return nil, err
		}
		if best != nil {
			out.Value, out.Best = yes, best
			break
		}
		no, out.None, yes = yes, none, yes-step
	}
	for inside(no, q.Count) && out.None == nil {
		best, none, err := a.fit(ctx, no)
		if err != nil {
			return nil, err
		}
		if out.None = none; best != nil {
			out.Value, out.Best, no = no, best, no+step
		}
	}
	if out.None != nil {
		out.Neighbour = no
	}
	out.Looked = len(a.known)
	return out, nil
}

func inside(i, n int) bool { return i >= 0 && i < n }

// asking remembers what was looked at.
type asking struct {
	q     Question
	known map[int]bool
}

// bracket is the last value that is not, and the first that is, as easy as all after it,
// by bounds; −1 and Count where there is none.
func (a *asking) bracket(ctx context.Context) (low, high int, err error) {
	low, high = -1, a.q.Count
	look := func(i int) error {
		ok, err := a.feasible(ctx, i)
		if ok == a.q.Easier {
			high = i
		} else {
			low = i
		}
		return err
	}
	for step := 1; high == a.q.Count && low < a.q.Count-1; step *= 2 {
		if err := look(min(step, a.q.Count) - 1); err != nil {
			return 0, 0, err
		}
	}
	for high-low > 1 {
		if err := look((low + high) / 2); err != nil {
			return 0, 0, err
		}
	}
	return low, high, nil
}

// feasible says whether the i-th value that the question tries may fit, by lower bounds of memory.
func (a *asking) feasible(ctx context.Context, i int) (bool, error) {
	at, hw := a.q.At(i)
	r, err := at.free(a.q.Fixed, a.q.Rows, hw)
	if err != nil {
		return false, err
	}
	a.known[i] = true
	ok, err := search.Feasible(ctx, r.spec, r.given, r.rows, hw)
	if err != nil {
		err = r.refusal(err)
	}
	return ok, err
}

// fit is what a search finds at a value.
func (a *asking) fit(ctx context.Context, i int) (*Fitted, *NothingFits, error) {
	at, hw := a.q.At(i)
	if hw.Effort == 0 {
		hw.Effort = AskEffort
	}
	a.known[i] = true
	best, err := at.Fit(ctx, a.q.Fixed, a.q.Rows, hw)
	if none, ok := errors.AsType[*NothingFits](err); ok && (hw.Budget == nil || !none.Spent) {
		return nil, none, nil
	}
	return best, nil, err
}

// UsedUp says whether a question ended since its Budget did.
func UsedUp(err error) bool {
	var none *NothingFits
	return errors.Is(err, search.ErrSpent) || errors.As(err, &none) && none.Spent
}
