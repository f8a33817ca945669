package train

import (
	"math/rand/v2"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/memplan/cost"
)

// Less memory never gives a faster plan, nor at the same host's cap one that takes
// more of the device: over 200 random caps on both memories, some of them without
// one on the host. The searches share what they measured. With allVariable it goes
// over micro-batches, a GPU, the demo and a preset that is planned at few layers too.
func TestLessMemoryIsNeverFaster(t *testing.T) {
	card, err := gpus.Lookup("a100-40")
	require.NoError(t, err)
	onCard := Hardware{Machine: func(ranks int) *cost.Machine { return card.Machine(ranks) }}
	type job struct {
		name   string
		change func(*Config)
		hw     Hardware
		global int
		slack  float64 // parts of a rung take more or less than its ends let expect
	}
	jobs := []job{
		{"all layers", func(c *Config) { c.Model, c.Batch = shaped(t, 2, 256), 4 }, CPUHardware(2), 0, 1e-9},
	}
	if os.Getenv(allVariable) != "" {
		jobs = append(jobs,
			job{"batches", func(c *Config) { c.Model, c.Zero = shaped(t, 2, 256), 2 }, CPUHardware(2), 8, 0.03},
			job{"a GPU", func(c *Config) { c.Model, c.Zero, c.Batch = shaped(t, 3, 256), 2, 4 }, onCard, 0, 0.07},
			job{"demo", func(c *Config) { c.Model, c.Batch = "spillway-demo", 4 }, CPUHardware(2), 0, 0.01},
			job{"few layers", func(c *Config) { c.Model, c.Ranks, c.Batch, c.Seq = "gpt2-medium", 4, 8, 1024 }, onCard, 0, 0.01},
		)
	}
	for _, j := range jobs {
		t.Run(j.name, func(t *testing.T) {
			c := Default()
			c.Ranks, c.Seq = 2, 128
			j.change(&c)
			lessIsNeverFaster(t, c, j.hw, j.global, j.slack)
		})
	}
}

func lessIsNeverFaster(t *testing.T, c Config, hw Hardware, global int, slack float64) {
	d, err := newFitDomain(&c, nothingGiven, global)
	require.NoError(t, err)
	if c.Zero != Default().Zero {
		d.zeros = []int{c.Zero}
	}
	s, err := newSearcher(c, hw.Machine(c.Ranks), true, tiersOf(&c))
	require.NoError(t, err)
	from, err := predict(s.cfg, s.machine, bounds)
	require.NoError(t, err)
	most := from.Plan.Layout.Spaces[graph.Device].LowerBound
	type outcome struct {
		device, host int64 // caps; host 0: none
		seconds      float64
		peak         int64
		flags        string
	}
	rng := rand.New(rand.NewPCG(11, 14))
	var all []outcome
	for i := range 200 {
		o := outcome{device: most/2 + rng.Int64N(most*3/5)}
		if i%2 == 1 {
			o.host = most/8 + rng.Int64N(most)
		}
		if i%20 > 9 && i >= 20 { // many at the same cap on the device
			o.device = all[i-10-i%10].device
		}
		s.cfg.DeviceMemory, s.cfg.HostMemory = o.device, o.host
		if best, _, _ := s.confirm(s.search(d.bases())); best != nil {
			require.NoError(t, best.Plan.Fit())
			o.seconds, o.peak, o.flags = 1/best.TokensPerSecond(), best.Plan.Layout.Spaces[graph.Device].Peak, flagsOf(&best.Config, global > 0, false)
		}
		all = append(all, o)
	}
	different, none := map[string]bool{}, 0
	for _, a := range all {
		different[a.flags] = true
		if a.seconds == 0 {
			none++
			continue
		}
		for _, b := range all { // has no less
			if b.device < a.device || b.host > 0 && (a.host == 0 || b.host < a.host) {
				continue
			}
			if b.seconds == 0 || b.seconds > a.seconds*(1+slack) {
				t.Errorf("caps of %d and %d: %.6g µs a token with %s;\nwith less, %d and %d: %.6g µs with %s", b.device, b.host, b.seconds*1e6, b.flags, a.device, a.host, a.seconds*1e6, a.flags)
			} else if b.host == a.host && b.peak < a.peak && slack < 1e-6 {
				t.Errorf("caps of %d and %d: %d bytes with %s;\nwith less, %d and %d: %d with %s", b.device, b.host, b.peak, b.flags, a.device, a.host, a.peak, a.flags)
			}
		}
	}
	require.Greater(t, len(different), 12, "the caps make a difference")
	t.Logf("%d configurations chosen, %d caps with none, %d measured", len(different), none, s.tried)
}
