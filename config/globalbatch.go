package config

import (
	"github.com/spillway-ml/spillway/internal/nearest"
)

// FollowGlobalBatch is the configuration with Accum such that a step has GlobalBatch rows over all ranks. It
// refuses what does not divide, and with accumGiven an Accum that says otherwise.
// Without a GlobalBatch it does nothing.
func (c Config) FollowGlobalBatch(accumGiven bool) (Config, error) {
	if c.GlobalBatch == 0 {
		return c, nil
	}
	switch rows := c.GlobalBatch / c.Ranks; {
	case c.GlobalBatch%c.Batch == 0:
	case c.GlobalBatch%c.Ranks != 0:
		return c, Refuse("Config.GlobalBatch %d is neither a multiple of Config.Batch %d rows nor of %d ranks; %s ranks divide it", c.GlobalBatch, c.Batch, c.Ranks, nearest.Divisors(c.GlobalBatch, c.Ranks))
	default:
		return c, Refuse("Config.GlobalBatch %d is no multiple of Config.Batch %d rows; micro-batches of %s rows are possible", c.GlobalBatch, c.Batch, nearest.Divisors(rows, c.Batch))
	}
	leaves := c.GlobalBatch / c.Batch
	if leaves%c.Ranks != 0 {
		return c, Refuse("Config.GlobalBatch %d is %d micro-batches of Config.Batch %d, which %d ranks do not divide; %s ranks do", c.GlobalBatch, leaves, c.Batch, c.Ranks, nearest.Divisors(leaves, c.Ranks))
	}
	if accum := leaves / c.Ranks; accumGiven && accum != c.Accum {
		return c, Refuse("Config.GlobalBatch %d with Config.Accum %d: %d ranks of Config.Batch %d take %d micro-batches each; leave one of them out", c.GlobalBatch, c.Accum, c.Ranks, c.Batch, accum)
	}
	c.Accum = leaves / c.Ranks
	return c, nil
}
