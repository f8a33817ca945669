package spillway

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/plan"
)

// Less memory never gives a faster plan: over random caps on device memory, of a model
// that is planned whole in the search and of one
// that is planned at few layers. The searches share what they planned. With
// SPILLWAY_TEST_GRID=all it goes over real models too, which takes minutes.
func TestLessMemoryIsNeverFaster(t *testing.T) {
	card, err := gpus.Lookup("a100-40")
	require.NoError(t, err)
	onCard := Hardware{Machine: func(ranks int) *cost.Machine { return card.Machine(ranks) }}
	model := func(layers int) string {
		dir := filepath.Join(t.TempDir(), fmt.Sprint(layers))
		require.NoError(t, os.Mkdir(dir, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"),
			fmt.Appendf(nil, `{"model_type":"gpt2","n_layer":%d,"n_head":16,"n_embd":1024,"vocab_size":4096,"n_positions":1024}`, layers), 0o644))
		return dir
	}
	all := os.Getenv("SPILLWAY_TEST_GRID") == "all"
	for _, c := range []struct {
		name   string
		cfg    func(*Config)
		hw     Hardware
		global int
		count  int // of caps
		zeros  []int
		large  bool
	}{
		{"all layers", func(c *Config) { c.Model, c.Ranks, c.Batch, c.Seq = model(2), 2, 8, 1024 }, onCard, 0, 200, []int{3}, false},
		{"few layers", func(c *Config) { c.Model, c.Ranks, c.Batch, c.Seq = model(18), 2, 8, 1024 }, onCard, 0, 40, []int{3}, false},
		{"demo", func(c *Config) { c.Model, c.Ranks, c.Batch, c.Seq = "spillway-demo", 2, 4, 128 }, CPUHardware(2), 0, 200, []int{3, 2, 1, 0}, true},
		{"batches", func(c *Config) { c.Model, c.Ranks, c.Seq = "spillway-demo", 2, 128 }, CPUHardware(2), 16, 200, []int{3, 2, 1, 0}, true},
		{"gpt2-medium", func(c *Config) { c.Model, c.Ranks, c.Batch, c.Seq, c.Precision = "gpt2-medium", 4, 8, 1024, "bf16" }, onCard, 0, 200, []int{3, 2, 1, 0}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.large && !all {
				t.Skip("SPILLWAY_TEST_GRID=all")
			}
			cfg := Default()
			c.cfg(&cfg)
			requireMonotone(t, cfg, c.hw, c.global, c.count, c.zeros)
		})
	}
}

func requireMonotone(t *testing.T, cfg Config, hw Hardware, global, count int, zeros []int) {
	d, err := newFitDomain(&cfg, nothingGiven, global)
	require.NoError(t, err)
	d.zeros = zeros
	s, err := newSearcher(cfg, hw.Machine(cfg.Ranks), true, tiersOf(&cfg))
	require.NoError(t, err)
	s.remember = true
	from, err := predict(s.cfg, s.machine, whole)
	require.NoError(t, err)
	most := from.Plan.Layout.Spaces[graph.Device].Peak
	rng := rand.New(rand.NewPCG(11, 14))
	caps := make([]int64, count)
	for i := range caps {
		caps[i] = most/8 + rng.Int64N(most)
	}
	slices.Sort(caps)
	last, lastFlags, different := 0.0, "", 0
	for _, limit := range caps {
		s.cfg.DeviceMemory = limit
		got, flags := 0.0, "nothing"
		best, _, err := s.confirm(s.search(d.bases()))
		if best != nil {
			require.NoError(t, best.Plan.Fit())
			require.LessOrEqual(t, best.Plan.Layout.Spaces[graph.Device].Peak, limit)
			got, flags = best.TokensPerSecond(), flagsOf(&best.Config, global > 0, false)
		} else if err != nil {
			var refused *plan.DoesNotFit
			require.ErrorAs(t, err, &refused)
		}
		if got < last*(1-memorySlack) {
			t.Errorf("%d bytes: %.6g tokens/s with %s; less memory gives %.6g with %s", limit, got, flags, last, lastFlags)
		}
		if flags != lastFlags {
			different++
		}
		last, lastFlags = max(last, got), flags
	}
	require.Greater(t, different, 10, "the caps make a difference")
	t.Logf("%d configurations chosen, %d measured, %d planned whole", different, s.tried, len(s.known))
}

// memorySlack is what the search's assumptions may be off: see confirm.
const memorySlack = 0.01
