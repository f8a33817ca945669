package planner

import (
	"context"
	"errors"
	"slices"

	"github.com/spillway-ml/spillway/fsdp"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/search"
)

// Question asks for the value at which a job begins to fit, or ceases to.
type Question struct {
	// Count is how many values there are, in an order in which more of them is either
	// always easier or always harder to fit; of Ranks mostly so.
	Count int
	// Easier says that later values need less of the memory: the first that fits is asked
	// for. Otherwise it is the last.
	Easier bool
	// Ranks says that the values are 1, 2, … data ranks. More of them are not always easier: shards
	// have whole blocks of elements, and a unit of fewer blocks than ranks is not sharded. See evenRanks.
	Ranks bool
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
	// Neighbour is the number of the value that doesn't fit; −1: there is none, for all do. Where no
	// number of ranks fits, it is the one that is nearest.
	Neighbour int
	None      *NothingFits // of the neighbour
	Looked    int          // values that were looked at
}

// AskEffort is the effort of each of the searches that an answer takes, where the
// Hardware has none: an answer says that something fits, and need not be the fastest.
const AskEffort = 100

// Ask answers a question. What is not fixed is free, as in Fit, and the answer is what
// Fit finds: the value is confirmed by a plan that fits, its neighbour by a search that
// finds none. Of numbers of ranks, others below the answer may fit, or one where nothing was found:
// looked at are those of a bisection and those of evenRanks.
func Ask(ctx context.Context, q Question) (*Answer, error) {
	a := &asking{q: q, known: map[int]float64{}}
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
	missed := 0
	out := &Answer{Value: -1, Neighbour: -1}
	if q.Ranks {
		if err := a.even(ctx, high, out); err != nil {
			return nil, err
		}
		if out.Best != nil {
			no = out.Value - 1
		}
	}
	for out.Best == nil && inside(yes, q.Count) {
		best, none, err := a.fit(ctx, yes)
		if err != nil {
			return nil, err
		}
		if best != nil {
			out.Value, out.Best = yes, best
			break
		}
		no, out.None, yes = yes, none, yes-step
		if missed++; a.q.Ranks && missed == mostMissed {
			break
		}
	}
	if fewer, err := a.again(ctx, out); err != nil {
		return nil, err
	} else if fewer {
		no, out.None = out.Value-1, nil
	}
	if q.Ranks && out.Best == nil {
		no, out.None = a.nearest(), nil
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
	known map[int]float64 // what the nearest plan takes of a cap; 0: something fits
	vain  []int           // numbers of ranks at which a search found nothing, though bounds let fit
	small bool            // the program of a micro-batch has at most smallProgram operations
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

// even answers with the first number of ranks below the i-th value that fits, of those that evenRanks names.
func (a *asking) even(ctx context.Context, i int, out *Answer) error {
	at, hw := a.q.At(0)
	r, err := at.free(a.q.Fixed, a.q.Rows, hw)
	if err != nil {
		return err
	}
	p, err := r.spec.Job.At(search.Shape{Batch: r.spec.Batch, Seq: r.spec.Seq, Precision: r.spec.Precision})
	if err != nil {
		return err
	}
	a.small = hw.Effort == 0 && hw.Budget == nil && programSize(p.Forward.Train) <= smallProgram
	ranks := evenRanks(p.Forward.Train, i+1)
	for _, n := range ranks {
		if _, ok := a.known[n-1]; ok {
			continue
		}
		ok, err := a.feasible(ctx, n-1)
		if err != nil {
			return err
		}
		if !ok {
			continue
		}
		best, _, err := a.fit(ctx, n-1)
		if err != nil {
			return err
		}
		if best != nil {
			out.Value, out.Best = n-1, best
			return nil
		}
	}
	return nil
}

// again looks with more effort at the last numbers of ranks below the answer at which a search found
// nothing, though bounds let fit. Only of small programs, where each takes some tenths of a second.
func (a *asking) again(ctx context.Context, out *Answer) (fewer bool, err error) {
	slices.Sort(a.vain)
	below := slices.DeleteFunc(slices.Compact(a.vain), func(i int) bool { return i >= out.Value || !a.small })
	for _, i := range below[max(0, len(below)-justBelow):] {
		best, _, err := a.fitWith(ctx, i, againEffort)
		if err != nil {
			return false, err
		}
		if best != nil {
			out.Value, out.Best = i, best
			return true, nil
		}
	}
	return false, nil
}

// nearest is the value, of those looked at, whose nearest plan takes the least of a cap: the first of equals.
func (a *asking) nearest() int {
	at := -1
	for i, least := range a.known {
		if at < 0 || least < a.known[at] || least == a.known[at] && i < at {
			at = i
		}
	}
	return at
}

// Numbers of ranks that are looked at beside a bisection's.
const (
	mostBlocks = 8   // of a unit and rank
	mostUnits  = 3   // of different sizes, the largest
	justBelow  = 4   // an answer
	mostMissed = 16  // in vain, that bounds let fit
	unpadded   = 100 // blocks a rank of the largest unit: with more, padding is below 1 % of it

	smallProgram = 200           // operations of a forward
	againEffort  = 2 * AskEffort // of a second look
)

// evenRanks are numbers of data ranks below one, ascending, that may need less memory than larger ones: the
// fewest at which a rank has a number of a unit's blocks, where padding is least, and those just below. None
// where padding is small.
func evenRanks(p *graph.Program, below int) (list []int) {
	blocks := fsdp.Blocks(p)
	slices.SortFunc(blocks, func(a, b int) int { return b - a })
	blocks = slices.Compact(blocks)
	if len(blocks) == 0 || blocks[0] > unpadded*below {
		return nil
	}
	for n := below - justBelow; n < below; n++ {
		list = append(list, n)
	}
	for _, all := range blocks[:min(len(blocks), mostUnits)] {
		for each := 1; each <= mostBlocks; each++ {
			list = append(list, (all+each-1)/each)
		}
	}
	list = slices.DeleteFunc(list, func(n int) bool { return n < 1 || n >= below })
	slices.Sort(list)
	return slices.Compact(list)
}

// feasible says whether the i-th value that the question tries may fit, by lower bounds of memory.
func (a *asking) feasible(ctx context.Context, i int) (bool, error) {
	at, hw := a.q.At(i)
	ok, least, err := at.feasible(ctx, a.q.Fixed, a.q.Rows, hw)
	a.known[i] = least
	if ok {
		a.known[i] = 0
	}
	return ok, err
}

// feasible is search.Feasible of a request.
func (q Request) feasible(ctx context.Context, fixed Fixed, rows int, hw Hardware) (bool, float64, error) {
	r, err := q.free(fixed, rows, hw)
	if err != nil {
		return false, 0, err
	}
	ok, least, err := search.Feasible(ctx, r.spec, r.given, r.rows, hw)
	if err != nil {
		err = r.refusal(err)
	}
	return ok, least, err
}

// fit is what a search finds at a value.
func (a *asking) fit(ctx context.Context, i int) (*Fitted, *NothingFits, error) {
	return a.fitWith(ctx, i, AskEffort)
}

// fitWith is fit with an effort where the Hardware has none.
func (a *asking) fitWith(ctx context.Context, i, effort int) (*Fitted, *NothingFits, error) {
	at, hw := a.q.At(i)
	if hw.Effort == 0 {
		hw.Effort = effort
	}
	if _, ok := a.known[i]; !ok {
		a.known[i] = 0
	}
	best, err := at.Fit(ctx, a.q.Fixed, a.q.Rows, hw)
	if none, ok := errors.AsType[*NothingFits](err); ok && (hw.Budget == nil || !none.Spent) {
		if a.known[i] == 0 {
			a.vain = append(a.vain, i)
		}
		return nil, none, nil
	}
	return best, nil, err
}

// UsedUp says whether a question ended since its Budget did.
func UsedUp(err error) bool {
	var none *NothingFits
	return errors.Is(err, search.ErrSpent) || errors.As(err, &none) && none.Spent
}
