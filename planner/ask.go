package planner

import (
	"context"
	"errors"
	"slices"

	"github.com/spillway-ml/spillway/fsdp"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/search"
)

// Question asks for the value at which a job begins to fit, or ceases to fit.
type Question struct {
	// Count is the number of values. With each next value the job fits more easily, or less easily;
	// with Ranks there are exceptions.
	Count int
	// Easier: later values need less memory, and the answer is the first that fits. Otherwise it is
	// the last that fits.
	Easier bool
	// Ranks: the values are 1, 2, … data ranks. More ranks do not always need less memory: a shard
	// is a whole number of blocks of elements, and a unit with fewer blocks than ranks is not
	// sharded. See evenRanks.
	Ranks bool
	// At returns the job and its hardware for the i-th value, from 0.
	At func(i int) (Request, Hardware)
	// Fixed and Rows are arguments of Fit.
	Fixed Fixed
	Rows  int
}

// Answer is a value that fits and its neighbour, which does not.
type Answer struct {
	Value int     // its index; −1: nothing fits
	Best  *Fitted // the fastest configuration for it; nil: nothing fits
	// Neighbour is the index of the adjacent value, which does not fit; −1: all values fit. If no
	// number of ranks fits, it is the number whose nearest plan needs the least of a cap.
	Neighbour int
	None      *NothingFits // the search's result for the neighbour
	Looked    int          // number of values examined
}

// AskEffort is the effort of each search for an answer if the Hardware sets none. An answer needs a
// plan that fits, not the fastest one.
const AskEffort = 100

// Ask answers a question. Fields that are not fixed are free, as in Fit. A plan that fits confirms
// the value; a search that finds none confirms its neighbour. Of the numbers of ranks, Ask examines
// only those of a bisection and of evenRanks: a smaller number, or one where nothing was found, may
// also fit.
func Ask(ctx context.Context, q Question) (*Answer, error) {
	a := &asking{q: q, known: map[int]float64{}}
	low, high, err := a.bracket(ctx)
	if err != nil {
		return nil, err
	}
	// A value that fits by lower bounds may not fit once buffers are placed, so a search decides.
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

// asking records the values examined so far.
type asking struct {
	q     Question
	known map[int]float64 // by value: the share of a cap that the nearest plan needs; 0: it may fit
	vain  []int           // values that fit by lower bounds, for which a search found nothing
	small bool            // the program of a micro-batch has at most smallProgram operations
}

// bracket returns the adjacent values between which jobs begin to fit, or cease to fit, by lower
// bounds. low is −1, or high is Count, if all values are on one side.
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

// even tries the numbers of ranks of evenRanks before the i-th value. It sets out to the first that
// fits.
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

// again searches with more effort at the largest numbers of ranks below the answer that fit by
// lower bounds, but for which a search found nothing. It does so only for small programs, where
// each search takes some tenths of a second.
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

// nearest returns the examined value whose nearest plan needs the smallest share of a cap; the
// first of equal ones.
func (a *asking) nearest() int {
	at := -1
	for i, least := range a.known {
		if at < 0 || least < a.known[at] || least == a.known[at] && i < at {
			at = i
		}
	}
	return at
}

// Limits on the numbers of ranks that are tried besides those of a bisection.
const (
	mostBlocks = 8   // blocks of a unit per rank
	mostUnits  = 3   // units, of different sizes, the largest first
	justBelow  = 4   // numbers just below an answer
	mostMissed = 16  // searches that find nothing although bounds allow it
	unpadded   = 100 // blocks of the largest unit per rank; with more, padding is below 1 % of it

	smallProgram = 200           // operations of a forward
	againEffort  = 2 * AskEffort // of a second search
)

// evenRanks returns numbers of data ranks below the given one, ascending, that may need less memory
// than larger numbers. They are the fewest ranks with a given number of a unit's blocks per rank,
// where padding is least, and the numbers just below. If padding is small, it returns none.
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

// feasible reports whether the i-th value may fit, by lower bounds of memory.
func (a *asking) feasible(ctx context.Context, i int) (bool, error) {
	at, hw := a.q.At(i)
	ok, least, err := at.feasible(ctx, a.q.Fixed, a.q.Rows, hw)
	a.known[i] = least
	if ok {
		a.known[i] = 0
	}
	return ok, err
}

// feasible is search.Feasible for a request.
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

// fit searches at the i-th value. It returns the fastest configuration, or why nothing fits.
func (a *asking) fit(ctx context.Context, i int) (*Fitted, *NothingFits, error) {
	return a.fitWith(ctx, i, AskEffort)
}

// fitWith is fit with the given effort if the Hardware sets none.
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

// UsedUp reports whether a question ended because its Budget was used up.
func UsedUp(err error) bool {
	var none *NothingFits
	return errors.Is(err, search.ErrSpent) || errors.As(err, &none) && none.Spent
}
