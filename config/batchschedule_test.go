package config

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

func TestParseBatchSchedule(t *testing.T) {
	s, err := ParseBatchSchedule("0:32, 500:64,2000:16")
	require.NoError(t, err)
	require.Equal(t, BatchSchedule{{0, 32}, {500, 64}, {2000, 16}}, s)
	require.Equal(t, "0:32,500:64,2000:16", s.String())
	for step, rows := range map[int]int{0: 32, 499: 32, 500: 64, 1999: 64, 2000: 16, math.MaxInt: 16} {
		require.Equal(t, rows, s.Rows(step), "step %d", step)
	}
	require.Equal(t, []int{64, 32, 16}, s.Distinct())
	require.Equal(t, 16, s.Divisor())
	require.Equal(t, BatchSchedule{{0, 32}, {500, 64}}, s.Until(2000))
	require.Equal(t, BatchSchedule{{0, 8}}, BatchSchedule{{0, 8}, {3, 8}}.Until(9), "an entry that changes nothing")
	none, err := ParseBatchSchedule("none")
	require.NoError(t, err)
	require.Nil(t, none)
	for text, want := range map[string]string{
		"":                                 `"" is no list of STEP:ROWS`,
		"32":                               "no list of STEP:ROWS",
		"0:32,":                            "no list of STEP:ROWS",
		"0:x":                              "no list of STEP:ROWS",
		"0:1e3":                            "no list of STEP:ROWS",
		"1:32":                             "the first entry is of step 1; it must be of step 0, as in 0:32",
		"0:8,0:9":                          "step 0 follows step 0",
		"0:8,-1:9":                         "step -1 follows step 0",
		"0:0":                              "0 rows from step 0 on; 1 to ",
		"0:8,5:-1":                         "-1 rows from step 5 on",
		"0:2000000,99999999999999999999:1": "no list of STEP:ROWS",
	} {
		_, err := ParseBatchSchedule(text)
		require.ErrorContains(t, err, want, text)
	}
}

// scheduled returns a Config with a batch schedule of 8, 24 and 16 rows, from steps 0, 3 and 5.
func scheduled(ranks, batch int, reproducible bool) Config {
	c := Default()
	c.Model, c.Ranks, c.Batch, c.Reproducible = "gpt2", ranks, batch, reproducible
	c.BatchSchedule = BatchSchedule{{0, 8}, {3, 24}, {5, 16}}
	return c
}

// TestBatchScheduleIsFollowed checks accumulation, leaves and shares at each step of a schedule.
// Without a step, the values are those of the largest batch.
func TestBatchScheduleIsFollowed(t *testing.T) {
	c := scheduled(2, 2, false)
	require.NoError(t, c.Validate())
	c, err := c.FollowGlobalBatch(false)
	require.NoError(t, err)
	require.Equal(t, []int{24, 6, 12}, []int{c.GlobalBatch, c.Accum, c.Leaves()})
	again, err := c.FollowGlobalBatch(false)
	require.NoError(t, err, "followed already")
	require.Equal(t, c, again)
	for step, want := range map[int][3]int{0: {8, 2, 4}, 2: {8, 2, 4}, 3: {24, 6, 12}, 4: {24, 6, 12}, 5: {16, 4, 8}, 99: {16, 4, 8}} {
		of := c.At(step)
		require.Equal(t, want, [3]int{of.StepRows(), of.Accum, of.Leaves()}, "step %d", step)
		require.Nil(t, of.Shares())
	}
	require.Equal(t, []graph.StepShape{{Rounds: 6}, {Rounds: 4}, {Rounds: 2}}, c.StepShapes())
	require.Equal(t, 4, c.LeastLeaves(), "of 8 rows, which divide those of all steps")

	c, err = scheduled(3, 2, true).FollowGlobalBatch(false)
	require.NoError(t, err)
	require.Equal(t, []graph.StepShape{{Rounds: 4}, {Rounds: 3, Shares: []int{3, 3, 2}}, {Rounds: 2, Shares: []int{2, 1, 1}}}, c.StepShapes())
	require.Equal(t, 4, c.LeastLeaves())
}

// TestBatchScheduleScalesTheRate checks that the learning rate scales with the rows of each step.
func TestBatchScheduleScalesTheRate(t *testing.T) {
	for scale, want := range map[string][3]float64{"none": {0.5, 0.5, 0.5}, "linear": {0.5, 1.5, 1}, "sqrt": {0.5, 0.5 * math.Sqrt(3), 0.5 * math.Sqrt(2)}} {
		c := scheduled(1, 2, false)
		if c.LR, c.LRScale = 0.5, scale; scale != "none" {
			c.LRBaseBatch = 8
		}
		require.NoError(t, c.Validate())
		for i, step := range []int{2, 3, 5} {
			require.Equal(t, want[i], c.LearningRate(step), "%s, step %d", scale, step)
		}
	}
}

// TestBatchSchedulesThatCannotBe checks that invalid schedules are rejected before training starts,
// whichever step is invalid.
func TestBatchSchedulesThatCannotBe(t *testing.T) {
	for _, c := range []struct {
		change func(c *Config)
		want   string
	}{
		{func(c *Config) { c.BatchSchedule[1].Step = 0 }, "Config.BatchSchedule 0:8,0:24,5:16: step 0 follows step 0"},
		{func(c *Config) { c.RankShares, c.Reproducible = []int{1, 3}, true }, "Config.BatchSchedule 0:8,3:24,5:16 with Config.RankShares [1 3]"},
		{func(c *Config) { c.AccumOrder = LayerOrder }, "Config.BatchSchedule 0:8,3:24,5:16 with Config.AccumOrder layer"},
		{func(c *Config) { c.GlobalBatch = 8 }, "Config.BatchSchedule 0:8,3:24,5:16 with Config.GlobalBatch 8"},
		{func(c *Config) { c.Batch = 8 }, "Config.BatchSchedule 0:8,3:24,5:16: a step of 24 rows is 3 micro-batches of Config.Batch 8, which 2 ranks do not divide"},
		{func(c *Config) { c.BatchSchedule[2].Rows = 14 }, "a step of 14 rows is 7 micro-batches of Config.Batch 2, which 2 ranks do not divide; 1 or 7 ranks do; Config.Reproducible gives each rank a share"},
		{func(c *Config) { c.BatchSchedule[0].Rows = 7 }, "a step of 7 rows is neither a multiple of Config.Batch 2 rows nor of 2 ranks"},
		{func(c *Config) { c.Batch, c.BatchSchedule[0].Rows, c.Reproducible = 4, 4, true }, "a step of 4 rows is 1 micro-batches of Config.Batch 4, and each of 2 ranks needs one"},
	} {
		k := scheduled(2, 2, false)
		c.change(&k)
		err := k.Validate()
		if err == nil {
			_, err = k.FollowGlobalBatch(false)
		}
		require.ErrorContains(t, err, c.want)
		require.ErrorIs(t, err, ErrRefused)
	}
	c := scheduled(2, 2, false)
	c.Accum = 2
	_, err := c.FollowGlobalBatch(true)
	require.ErrorContains(t, err, "Config.BatchSchedule 0:8,3:24,5:16 with Config.Accum 2")
}
