package config

import (
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/comm/algorithm"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/nearest"
)

// FollowGlobalBatch returns the configuration with Accum computed so that a step has
// GlobalBatch rows over all ranks. With BatchSchedule that is its largest batch; with
// RankShares Accum is the largest share. It refuses uneven divisions unless Reproducible, and,
// with accumGiven, a contradicting Accum. If none of these fields is set it returns c.
func (c Config) FollowGlobalBatch(accumGiven bool) (Config, error) {
	if len(c.BatchSchedule) > 0 {
		return c.followSchedule(accumGiven)
	}
	if c.GlobalBatch == 0 && c.RankShares == nil {
		return c, nil
	}
	if err := c.refuseRows(accumGiven); err != nil {
		return c, err
	}
	leaves := c.leaves()
	accum := (leaves + c.DataRanks() - 1) / c.DataRanks()
	if c.RankShares != nil {
		accum = slices.Max(c.RankShares)
	}
	if accumGiven && accum != c.Accum {
		if c.RankShares != nil {
			return c, Refuse("Config.RankShares %v with Config.Accum %d: the largest share is %d micro-batches; leave one of them out", c.RankShares, c.Accum, accum)
		}
		return c, Refuse("Config.GlobalBatch %d with Config.Accum %d: %d ranks of Config.Batch %d take %d micro-batches each; leave one of them out",
			c.GlobalBatch, c.Accum, c.DataRanks(), c.Batch, accum)
	}
	c.Accum = accum
	return c, nil
}

// refuseRows refuses a number of rows per step that the ranks cannot share.
func (c *Config) refuseRows(accumGiven bool) error {
	if err := c.validateShares(); err != nil || c.GlobalBatch == 0 {
		return err
	}
	leaves, what := c.leaves(), fmt.Sprintf("Config.GlobalBatch %d", c.GlobalBatch)
	if len(c.BatchSchedule) > 0 {
		what = fmt.Sprintf("Config.BatchSchedule %.80s: a step of %d rows", c.BatchSchedule, c.GlobalBatch)
	}
	switch rows := c.GlobalBatch / c.DataRanks(); {
	case c.Reproducible && leaves < c.DataRanks():
		return c.tooFew(what, leaves)
	case c.Reproducible, c.GlobalBatch%(c.Batch*c.DataRanks()) == 0:
		return nil
	case c.GlobalBatch%c.Batch == 0:
		return c.Uneven(accumGiven, "%s is %d micro-batches of Config.Batch %d, which %d ranks do not divide; %s ranks do", what, leaves, c.Batch, c.DataRanks(), nearest.Divisors(leaves, c.DataRanks()))
	case c.GlobalBatch%c.DataRanks() != 0:
		return c.Uneven(accumGiven, "%s is neither a multiple of Config.Batch %d rows nor of %d ranks; %s ranks divide it", what, c.Batch, c.DataRanks(), nearest.Divisors(c.GlobalBatch, c.DataRanks()))
	default:
		return c.Uneven(accumGiven, "%s is no multiple of Config.Batch %d rows; micro-batches of %s rows are possible", what, c.Batch, nearest.Divisors(rows, c.Batch))
	}
}

// tooFew refuses fewer micro-batches than ranks. If smaller micro-batches would work, the error
// says so.
func (c *Config) tooFew(what string, leaves int) error {
	how, instead := "", []string(nil)
	if batch := c.batchForAll(); batch > 0 {
		how, instead = fmt.Sprintf("; or give Config.Batch %d", batch), []string{fmt.Sprintf("Batch=%d", batch)}
	}
	err := Refuse("%s is %d micro-batches of Config.Batch %d, and each of %d ranks needs one; at most %d ranks have one%s", what, leaves, c.Batch, c.DataRanks(), leaves, how)
	if refused, ok := errors.AsType[*FieldError](err); ok {
		refused.Instead = instead
	}
	return err
}

// batchForAll returns the largest micro-batch size, in rows, with which each rank has a micro-batch
// in every step; the last one may be padded. 0: there are fewer rows than ranks.
func (c *Config) batchForAll() int {
	rows := c.GlobalBatch
	if all := c.BatchSchedule.Distinct(); len(all) > 0 {
		rows = all[len(all)-1]
	}
	if rows < c.DataRanks() || c.RankShares != nil {
		return 0
	}
	return min(c.Batch, (rows-1)/max(c.DataRanks()-1, 1))
}

// Uneven returns the error for rows of a step that the ranks do not divide. If no other field
// contradicts Reproducible, it suggests that.
func (c *Config) Uneven(accumGiven bool, format string, args ...any) error {
	err, field := fmt.Errorf(format, args...), "GlobalBatch"
	shared := *c
	shared.Reproducible = true
	if all := c.BatchSchedule.Distinct(); len(all) > 0 {
		field = "BatchSchedule"
		shared = shared.having(all[len(all)-1])
	}
	batch, few := c.batchForAll(), shared.Leaves() < c.DataRanks()
	inTheWay := accumGiven || c.ShardSize > 0 && c.ShardSize < c.DataRanks() || c.Algorithm() == algorithm.Ring || c.AsksLayers()
	if inTheWay || batch == 0 || few && c.GlobalBatch%c.DataRanks() == 0 {
		return &FieldError{Field: field, err: err}
	}
	instead, with := []string{"Reproducible"}, ""
	if few {
		instead, with = append(instead, fmt.Sprintf("Batch=%d", batch)), fmt.Sprintf(" with Config.Batch %d", batch)
	}
	return &FieldError{Field: field, Instead: instead, err: fmt.Errorf("%w; Config.Reproducible%s gives each rank a share and pads the last micro-batch", err, with)}
}

// validateShares refuses RankShares that do not match the number of ranks or the rows of a
// step.
func (c *Config) validateShares() error {
	s := c.RankShares
	switch {
	case s == nil:
		return nil
	case !c.Reproducible:
		return Refuse("Config.RankShares needs Config.Reproducible: other sums over ranks have no uneven shares")
	case len(s) != c.DataRanks():
		return Refuse("Config.RankShares %v: %d shares for %d ranks; give one for each", s, len(s), c.DataRanks())
	case slices.Min(s) < 1 || int64(slices.Max(s)) > largest["Accum"]:
		return Refuse("Config.RankShares %v: each rank has 1 to %d micro-batches", s, largest["Accum"])
	}
	if sum, leaves := total(s), c.leaves(); sum != leaves {
		return Refuse("Config.RankShares %v are %d micro-batches, and Config.GlobalBatch %d of Config.Batch %d is %d", s, sum, c.GlobalBatch, c.Batch, leaves)
	}
	return nil
}

func total(list []int) (sum int) {
	for _, n := range list {
		sum += n
	}
	return sum
}

// leaves returns the number of micro-batches of a step over all ranks, computed from the fields.
func (c *Config) leaves() int {
	switch {
	case c.Reproducible && c.GlobalBatch > 0:
		return (c.GlobalBatch + c.Batch - 1) / c.Batch
	case c.RankShares != nil:
		return total(c.RankShares)
	case c.GlobalBatch > 0:
		return c.GlobalBatch / c.Batch
	}
	return c.DataRanks() * c.Accum
}

// Leaves returns the number of micro-batches of a step over all ranks.
func (c *Config) Leaves() int {
	if !c.Reproducible {
		return c.DataRanks() * c.Accum
	}
	return c.leaves()
}

// StepRows returns the number of rows of a step over all ranks, without padding.
func (c *Config) StepRows() int {
	if c.Reproducible && c.GlobalBatch > 0 {
		return c.GlobalBatch
	}
	return c.Leaves() * c.Batch
}

// Shares returns the number of micro-batches of each rank in a step; nil: each has Accum.
func (c *Config) Shares() []int {
	leaves := c.Leaves()
	if leaves == c.DataRanks()*c.Accum {
		return nil
	}
	if c.RankShares != nil {
		return c.RankShares
	}
	return graph.EvenShares(leaves, c.DataRanks())
}

// EvalAccum returns the number of micro-steps of an evaluation batch. With Reproducible it is that
// of a step, so that a batch reads the same rows at any number of ranks.
func (c *Config) EvalAccum() int {
	if c.Reproducible && !c.Inference {
		return c.Accum
	}
	return 1
}

// having returns the configuration with GlobalBatch rows and with Accum as the number of
// micro-batches of the busiest rank.
func (c Config) having(rows int) Config {
	c.GlobalBatch = rows
	c.Accum = (c.leaves() + c.DataRanks() - 1) / c.DataRanks()
	return c
}
