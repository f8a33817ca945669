package config

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// maxStepRows bounds the rows of a step.
const maxStepRows = 1 << 20

// ParseBatchSchedule reads STEP:ROWS pairs separated by commas, as in 0:32,500:64. An empty
// text means no schedule.
func ParseBatchSchedule(text string) (s BatchSchedule, err error) {
	if strings.EqualFold(text, "none") {
		return nil, nil
	}
	for _, part := range strings.Split(text, ",") {
		from, rows, ok := strings.Cut(strings.TrimSpace(part), ":")
		step, err1 := strconv.Atoi(from)
		n, err2 := strconv.Atoi(rows)
		if !ok || err1 != nil || err2 != nil {
			return nil, fmt.Errorf("%.80q is no list of STEP:ROWS; write it as in 0:32,500:64,2000:128", text)
		}
		s = append(s, BatchFrom{step, n})
	}
	if err = s.validate(); err != nil {
		return nil, fmt.Errorf("%.80q: %w", text, err)
	}
	return s, nil
}

// String formats the schedule as ParseBatchSchedule reads it; "" if it is empty.
func (s BatchSchedule) String() string {
	parts := make([]string, len(s))
	for i, b := range s {
		parts[i] = fmt.Sprintf("%d:%d", b.Step, b.Rows)
	}
	return strings.Join(parts, ",")
}

// validateSchedule refuses an invalid schedule and fields that contradict one.
func (c *Config) validateSchedule() error {
	s := c.BatchSchedule
	switch err := s.validate(); {
	case len(s) == 0:
		return nil
	case err != nil:
		return Refuse("Config.BatchSchedule %.80s: %w", s, err)
	case c.RankShares != nil:
		return Refuse("Config.BatchSchedule %.80s with Config.RankShares %v: the shares are of steps of one size, and the schedule has several; leave one of them out", s, c.RankShares)
	case c.AsksLayers():
		return Refuse("Config.BatchSchedule %.80s with Config.AccumOrder layer: layer order needs the same number of micro-batches in every step; leave Config.AccumOrder out", s)
	}
	return nil
}

func (s BatchSchedule) validate() error {
	for i, b := range s {
		switch {
		case i == 0 && b.Step != 0:
			return fmt.Errorf("the first entry is of step %d; it must be of step 0, as in 0:%d", b.Step, max(b.Rows, 1))
		case i > 0 && b.Step <= s[i-1].Step:
			return fmt.Errorf("step %d follows step %d; steps must increase", b.Step, s[i-1].Step)
		case b.Rows < 1 || b.Rows > maxStepRows:
			return fmt.Errorf("%d rows from step %d on; 1 to %d are possible", b.Rows, b.Step, maxStepRows)
		}
	}
	return nil
}

// Rows returns the rows of the step that follows step done steps.
func (s BatchSchedule) Rows(step int) int {
	rows := s[0].Rows
	for _, b := range s {
		if b.Step <= step {
			rows = b.Rows
		}
	}
	return rows
}

// Distinct lists the different row counts of its steps, largest first.
func (s BatchSchedule) Distinct() (list []int) {
	for _, b := range s {
		list = append(list, b.Rows)
	}
	slices.Sort(list)
	list = slices.Compact(list)
	slices.Reverse(list)
	return list
}

// Divisor returns the greatest common divisor of all steps' rows; 0 for an empty schedule.
func (s BatchSchedule) Divisor() (rows int) {
	for _, b := range s {
		for n := b.Rows; n > 0; {
			rows, n = n, rows%n
		}
	}
	return rows
}

// Until returns the schedule of the first steps steps only, without entries that change nothing.
func (s BatchSchedule) Until(steps int) (part BatchSchedule) {
	for _, b := range s {
		if b.Step < steps && (len(part) == 0 || part[len(part)-1].Rows != b.Rows) {
			part = append(part, b)
		}
	}
	return part
}

// At returns the configuration for the step that follows step done steps. With a BatchSchedule,
// GlobalBatch and Accum are those of that step, and so are Leaves, Shares and StepRows.
func (c Config) At(step int) Config {
	if len(c.BatchSchedule) > 0 {
		return c.having(c.BatchSchedule.Rows(step))
	}
	return c
}

// followSchedule is FollowGlobalBatch with a BatchSchedule: it sets GlobalBatch and Accum for
// the largest batch, and checks that the ranks can share each batch.
func (c Config) followSchedule(accumGiven bool) (Config, error) {
	s := c.BatchSchedule
	all := s.Distinct()
	if c.GlobalBatch != 0 && c.GlobalBatch != all[0] {
		return c, Refuse("Config.BatchSchedule %.80s with Config.GlobalBatch %d: the schedule says the rows of each step; leave Config.GlobalBatch out", s, c.GlobalBatch)
	}
	for _, rows := range all {
		of := c
		of.GlobalBatch = rows
		if err := of.refuseRows(accumGiven); err != nil {
			return c, err
		}
	}
	largest := c.having(all[0])
	if accumGiven && largest.Accum != c.Accum {
		return c, Refuse("Config.BatchSchedule %.80s with Config.Accum %d: a step's micro-batches follow from its rows; leave Config.Accum out", s, c.Accum)
	}
	return largest, nil
}

// LeastLeaves returns the number of micro-batches that a number of ranks must be able to share in
// every step. It is the smallest of any step, or, if the ranks must divide the micro-batches
// evenly, the greatest common divisor over all steps.
func (c *Config) LeastLeaves() int {
	switch all := c.BatchSchedule.Distinct(); {
	case len(all) == 0:
		return c.Leaves()
	case c.Reproducible:
		of := c.having(all[len(all)-1])
		return of.Leaves()
	}
	return c.BatchSchedule.Divisor() / c.Batch
}

// StepShapes lists the numbers of micro-batches that steps have with a BatchSchedule, largest
// first; nil if all steps have the same number.
func (c *Config) StepShapes() (list []graph.StepShape) {
	for _, rows := range c.BatchSchedule.Distinct() {
		of := c.having(rows)
		list = append(list, graph.StepShape{Rounds: of.Accum, Shares: of.Shares()})
	}
	return list
}
