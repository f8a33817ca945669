package data

import (
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"
	"sync/atomic"
)

// Order decides which window of the source a sample is.
type Order int

const (
	// Sequential uses the windows in order and starts again after the last: sample i starts at
	// token i·T modulo (length-1)/T·T.
	Sequential Order = iota
	// Shuffled uses the (length-1)/T windows in an order drawn by the seed and the epoch (see
	// epochKey): every window once an epoch. Within an epoch no two ranks, rows or steps share a
	// window.
	Shuffled
)

func (o Order) String() string {
	switch o {
	case Sequential:
		return "sequential"
	case Shuffled:
		return "shuffled"
	}
	return fmt.Sprintf("Order(%d)", int(o))
}

// ParseOrder reads an order's name, in any case.
func ParseOrder(s string) (Order, error) {
	switch strings.ToLower(s) {
	case "sequential":
		return Sequential, nil
	case "shuffled":
		return Shuffled, nil
	}
	return 0, fmt.Errorf("order %q is unknown; it must be sequential or shuffled", s)
}

// SamplerConfig shapes the batches. All sizes are 1 or more.
type SamplerConfig struct {
	Order Order
	Seed  int64 // of the Shuffled order
	Seq   int   // T, tokens a row
	Batch int   // B, rows of a micro-batch on a rank
	Ranks int   // W
	StepRows
	// Later changes how many rows a step has, from later steps on: see RowsFrom.
	Later []RowsFrom
	// Vocab bounds the tokens: inputs must be in [0, Vocab), targets in
	// [-1, Vocab). 0 means no check.
	Vocab int
}

// StepRows is how the rows of a step are distributed over ranks and micro-batches.
type StepRows struct {
	Accum int // K, micro-batches a step
	// Shares is the number of micro-batches of each rank in a step, 1 to K; nil: K each. They
	// are distributed in rounds: in round k each rank with more than k takes the next one.
	Shares []int
	// Rows is the number of rows of a step; 0 means as many as its micro-batches hold. Other
	// rows of the last micro-batches are padding: token 0 and target -1.
	Rows int
}

// RowsFrom is the distribution of rows from step Step on, counted from 0.
type RowsFrom struct {
	Step int
	StepRows
}

// Sampler produces batches. Samples are numbered over the whole run: row b of rank r's
// micro-batch k of step s is sample
//
//	i = N + rows of steps s₀ to s − 1 + leaf(k, r)·B + b,   leaf(k, r) = k·W + r for equal shares
//
// where N samples were seen before step s₀ (both 0 until Seek), and leaf numbers the
// micro-batches of a step over all ranks. A rank's share is its number of micro-batches in a
// step. A run resumed with another batch, accumulation or number of ranks continues with the
// sample after the last one seen. Its methods except Seek may be called concurrently.
type Sampler struct {
	src     Source
	targets TargetSource // nil: the next tokens
	c       SamplerConfig
	windows int64 // (length-1)/T
	spans   []span
	offset  int64 // N − rows of steps 0 to s₀ − 1
	epochs  int   // version of epochKey
	// epoch is the permutation of the epoch used last, for Shuffled. Ranks are within a step of
	// each other, so they nearly always need this one; otherwise another one is derived.
	epoch atomic.Pointer[epochOrder]
}

// span is a range of steps whose rows are distributed alike.
type span struct {
	RowsFrom
	rows, before int64 // of each of its steps, and of all steps before them
}

type epochOrder struct {
	epoch int64
	perm  permutation
}

// Versions of epochKey. A checkpoint records the one that its run uses.
const (
	epochsAdded  = 1 // seed+e: epoch 1 of seed 1 is epoch 0 of seed 2
	epochsHashed = 2
	// Epochs is the version of new samplers.
	Epochs = epochsHashed
)

// epochKey returns the seed of an epoch's permutation. Epoch 0 has the run's seed in every version.
// mix64 is a bijection that maps 0 to 0 and neighbours far apart, so neighbouring seeds share no
// epoch.
func epochKey(version int, seed, epoch uint64) uint64 {
	if version == epochsAdded {
		return seed + epoch
	}
	return seed + mix64(epoch)
}

// NewSampler checks the configuration against the source, which must hold at least one window
// and its last target: T+1 tokens.
func NewSampler(src Source, c SamplerConfig) (*Sampler, error) {
	for _, f := range []struct {
		name  string
		value int
	}{{"seq", c.Seq}, {"batch", c.Batch}, {"accum", c.Accum}, {"ranks", c.Ranks}} {
		if f.value < 1 {
			return nil, fmt.Errorf("sample data: %s is %d; it must be 1 or more", f.name, f.value)
		}
	}
	if c.Order != Sequential && c.Order != Shuffled {
		return nil, fmt.Errorf("sample data: order %v is unknown; it must be sequential or shuffled", c.Order)
	}
	if c.Vocab < 0 || c.Vocab > math.MaxInt32 {
		return nil, fmt.Errorf("sample data: vocabulary of %d; it must be 0 (unchecked) to %d", c.Vocab, math.MaxInt32)
	}
	s := &Sampler{src: src, c: c, epochs: Epochs}
	for _, from := range append([]RowsFrom{{0, c.StepRows}}, c.Later...) {
		if err := s.addSpan(from); err != nil {
			return nil, err
		}
	}
	if n := src.Len(); n-1 < int64(c.Seq) {
		name := "the data"
		if b, ok := src.(*Buffer); ok {
			name = b.Name()
		}
		return nil, fmt.Errorf("sample data: %s has %d tokens, under one row of %d and its last target; give %d tokens at least, or a seq of %d at most", name, n, c.Seq, int64(c.Seq)+1, max(n-1, 0))
	}
	s.windows = (src.Len() - 1) / int64(c.Seq)
	s.targets, _ = src.(TargetSource)
	if c.Order == Shuffled {
		s.epoch.Store(s.orderOf(0))
	}
	return s, nil
}

// addSpan adds the steps from from.Step on. It refuses an impossible distribution of rows.
func (s *Sampler) addSpan(from RowsFrom) error {
	c := &s.c
	if _, ok := mulAll(int64(c.Batch), int64(max(from.Accum, 1)), int64(c.Ranks), int64(c.Seq)); !ok {
		return fmt.Errorf("sample data: ranks %d × accum %d × batch %d × seq %d is over 2^63 tokens a step", c.Ranks, from.Accum, c.Batch, c.Seq)
	}
	if from.Shares != nil && (len(from.Shares) != c.Ranks || slices.Min(from.Shares) < 1 || slices.Max(from.Shares) > from.Accum) {
		return fmt.Errorf("sample data: shares %v; they must be %d of 1 to %d micro-batches", from.Shares, c.Ranks, from.Accum)
	}
	most := from.leaf(c.Ranks, from.Accum, 0) * int64(c.Batch)
	if from.Rows < 0 || int64(from.Rows) > most {
		return fmt.Errorf("sample data: %d rows a step; they must be 0 (all) to %d", from.Rows, most)
	}
	next := span{RowsFrom: from, rows: most}
	if from.Rows > 0 {
		next.rows = int64(from.Rows)
	}
	if n := len(s.spans); n > 0 {
		last := &s.spans[n-1]
		steps := int64(from.Step - last.Step)
		before, ok := mulAll(last.rows, max(steps, 1))
		if steps < 1 || from.Accum < 1 || !ok || before > math.MaxInt64-last.before {
			return fmt.Errorf("sample data: steps from %d on, of %d micro-batches, follow those from %d on; steps must grow, of 1 micro-batch or more, up to 2^63 samples", from.Step, from.Accum, last.Step)
		}
		next.before = last.before + before
	}
	s.spans = append(s.spans, next)
	return nil
}

// of returns the span that holds a step.
func (s *Sampler) of(step int) *span {
	i := len(s.spans) - 1
	for i > 0 && s.spans[i].Step > step {
		i--
	}
	return &s.spans[i]
}

// leaf returns the number of a rank's micro-batch among all those of the step.
func (c *StepRows) leaf(ranks, micro, rank int) int64 {
	if c.Shares == nil {
		return int64(micro)*int64(ranks) + int64(rank)
	}
	n := int64(0)
	for r, share := range c.Shares {
		n += int64(min(share, micro))
		if r < rank && share > micro {
			n++
		}
	}
	return n
}

// Rows returns how many rows of a step are samples, without padding.
func (s *Sampler) Rows(step int) int64 { return s.of(step).rows }

// Share returns how many micro-batches a rank has in a step.
func (s *Sampler) Share(step, rank int) int {
	c := s.of(step)
	if c.Shares == nil {
		return c.Accum
	}
	return c.Shares[rank]
}

// EachMicro visits the micro-batches of a step, rank by rank.
func (s *Sampler) EachMicro(step int, visit func(micro, rank int) error) error {
	for rank := range s.c.Ranks {
		for micro := range s.Share(step, rank) {
			if err := visit(micro, rank); err != nil {
				return err
			}
		}
	}
	return nil
}

// CountTargets returns the counted targets of a step, all of whose targets count.
func (s *Sampler) CountTargets(step int) (sum Counted) {
	each := int64(s.c.Batch)
	for rows := s.Rows(step); rows > 0; rows -= each {
		sum.Add(min(rows, each) * int64(s.c.Seq))
	}
	return sum
}

// IsPadding says whether a row is padding; its targets are -1.
func (s *Sampler) IsPadding(step, micro, rank, row int) bool {
	return s.inStep(step, micro, rank, row) >= s.Rows(step)
}

// inStep returns the number of a row among those of its step, padding included.
func (s *Sampler) inStep(step, micro, rank, row int) int64 {
	return s.of(step).leaf(s.c.Ranks, micro, rank)*int64(s.c.Batch) + int64(row)
}

// before returns the number of rows of all earlier steps.
func (s *Sampler) before(step int) int64 {
	c := s.of(step)
	return c.before + int64(step-c.Step)*c.rows
}

// mulAll multiplies positive numbers; it returns false on overflow.
func mulAll(xs ...int64) (int64, bool) {
	product := int64(1)
	for _, x := range xs {
		hi, lo := bits.Mul64(uint64(product), uint64(x))
		if hi != 0 || lo > math.MaxInt64 {
			return 0, false
		}
		product = int64(lo)
	}
	return product, true
}

// Seq returns the number of tokens of a row.
func (s *Sampler) Seq() int { return s.c.Seq }

// Windows returns the number of windows of the source, which is an epoch's number of samples.
func (s *Sampler) Windows() int64 { return s.windows }

// GlobalSample returns the number of a row's sample over the whole run, from 0. It is unique to
// (step, micro, rank, row), except for padding, and keys dropout. Arguments count from 0 and
// must be in range.
func (s *Sampler) GlobalSample(step, micro, rank, row int) int64 {
	return s.offset + s.before(step) + s.inStep(step, micro, rank, row)
}

// Seek makes step, from 0, begin with the given sample. Neither argument may be negative.
func (s *Sampler) Seek(step int, sample int64) error {
	if step < 0 || sample < 0 || !s.reaches(step, sample) {
		return fmt.Errorf("sample data: step %d from sample %d of steps of %d rows is over 2^63 samples", step, sample, s.Rows(max(step, 0)))
	}
	s.offset = sample - s.before(step)
	return nil
}

// reaches says whether sample plus the rows of the steps before one is at most 2^63.
func (s *Sampler) reaches(step int, sample int64) bool {
	c := s.of(step)
	return int64(step-c.Step) <= (math.MaxInt64-sample-c.before)/c.rows
}

// EpochsVersion returns the version by which epochs are shuffled (see Epochs).
func (s *Sampler) EpochsVersion() int { return s.epochs }

// UseEpochs shuffles epochs by a version, so that a run resumed from an older checkpoint sees the
// same samples as without the interruption. 0, for checkpoints that record no version, is the
// first.
func (s *Sampler) UseEpochs(version int) error {
	if version == 0 {
		version = epochsAdded
	}
	if version < epochsAdded || version > Epochs {
		return fmt.Errorf("sample data: epochs of version %d are unknown, the newest here is %d; use the Spillway that wrote the checkpoint, or a newer one", version, Epochs)
	}
	s.epochs = version
	if s.c.Order == Shuffled {
		s.epoch.Store(s.orderOf(0))
	}
	return nil
}

// Tell returns the sample that a step begins with, which is the number of samples before it.
func (s *Sampler) Tell(step int) int64 { return s.GlobalSample(step, 0, 0, 0) }

// StepAt returns the first step that begins at the sample or later.
func (s *Sampler) StepAt(sample int64) int {
	for i := len(s.spans) - 1; ; i-- {
		c := &s.spans[i]
		left := sample - s.offset - c.before
		if left > 0 || i == 0 {
			return c.Step + int((max(left, 0)+c.rows-1)/c.rows)
		}
	}
}

// Translate returns the sample of this sampler at which to continue after n samples of seq
// tokens per row: in the same epoch, and no earlier in the data.
func (s *Sampler) Translate(n int64, seq int) int64 {
	windows := (s.src.Len() - 1) / int64(seq)
	if windows <= 0 || n <= 0 {
		return 0
	}
	tokens := n % windows * int64(seq)
	inEpoch := (tokens + int64(s.c.Seq) - 1) / int64(s.c.Seq)
	return n/windows*s.windows + min(inEpoch, s.windows)
}

// Start returns the index of the first token of a row's window.
func (s *Sampler) Start(step, micro, rank, row int) int64 {
	i := s.GlobalSample(step, micro, rank, row)
	window := i % s.windows
	if s.c.Order == Shuffled {
		e := i / s.windows
		order := s.epoch.Load()
		if order.epoch == e {
			window = int64(order.perm.at(uint64(window)))
		} else {
			window = s.otherEpoch(e, window)
		}
	}
	return window * int64(s.c.Seq)
}

func (s *Sampler) orderOf(e int64) *epochOrder {
	return &epochOrder{e, newPermutation(epochKey(s.epochs, uint64(s.c.Seed), uint64(e)), uint64(s.windows))}
}

// otherEpoch derives another epoch's permutation and keeps it if it is newer. It allocates once
// per epoch and rank.
func (s *Sampler) otherEpoch(e, window int64) int64 {
	order := s.orderOf(e)
	if old := s.epoch.Load(); old.epoch < e {
		s.epoch.CompareAndSwap(old, order)
	}
	return int64(order.perm.at(uint64(window)))
}

// Fill writes a rank's micro-batch: inputs and targets, both (B, T) row-major. step, micro and
// rank count from 0. It allocates nothing within an epoch. Positions out of range, slices of
// another length and tokens beyond the vocabulary are errors.
func (s *Sampler) Fill(step, micro, rank int, inputs, targets []int32) error {
	c := &s.c
	switch {
	case step < 0 || step == math.MaxInt || !s.reaches(step+1, max(s.offset, 0)):
		return fmt.Errorf("sample data: step %d; it must be 0 or more, and its samples at most 2^63", step)
	case s.Tell(step) < 0:
		return fmt.Errorf("sample data: step %d is before the first sample", step)
	case rank < 0 || rank >= c.Ranks:
		return fmt.Errorf("sample data: rank %d; it must be 0 to %d", rank, c.Ranks-1)
	case micro < 0 || micro >= s.Share(step, rank):
		return fmt.Errorf("sample data: micro-batch %d; it must be 0 to %d", micro, s.Share(step, rank)-1)
	case len(inputs) != c.Batch*c.Seq || len(targets) != len(inputs):
		return fmt.Errorf("sample data: %d inputs and %d targets; both must be batch %d × seq %d = %d", len(inputs), len(targets), c.Batch, c.Seq, c.Batch*c.Seq)
	}
	for row := range c.Batch {
		in, out := inputs[row*c.Seq:(row+1)*c.Seq], targets[row*c.Seq:(row+1)*c.Seq]
		if s.IsPadding(step, micro, rank, row) {
			clear(in)
			for i := range out {
				out[i] = -1
			}
			continue
		}
		start := s.Start(step, micro, rank, row)
		if err := s.src.Tokens(in, start); err != nil {
			return err
		}
		var err error
		if s.targets != nil {
			err = s.targets.Targets(out, start)
		} else {
			err = s.src.Tokens(out, start+1)
		}
		if err != nil {
			return err
		}
		if c.Vocab == 0 {
			continue
		}
		for i, t := range in {
			if uint32(t) >= uint32(c.Vocab) {
				return s.beyond("token", start+int64(i), t, 0)
			}
		}
		for i, t := range out {
			if uint32(t+1) > uint32(c.Vocab) {
				if s.targets == nil {
					return s.beyond("token", start+1+int64(i), t, 0)
				}
				return s.beyond("target of token", start+int64(i), t, -1)
			}
		}
	}
	return nil
}

func (s *Sampler) beyond(what string, index int64, t int32, low int) error {
	name := ""
	if b, ok := s.src.(*Buffer); ok {
		name = " of " + b.Name()
	}
	return fmt.Errorf("sample data: %s %d%s is %d, beyond the vocabulary of %d; it must be %d to %d", what, index, name, t, s.c.Vocab, low, s.c.Vocab-1)
}

// Counted counts the counted targets of a step.
type Counted struct {
	All     int64
	Squares float64 // sum of the squares of each micro-batch's count
}

// Add adds a micro-batch of n counted targets.
func (c *Counted) Add(n int64) {
	c.All += n
	c.Squares += float64(n) * float64(n)
}
