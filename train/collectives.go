package train

import (
	"strings"

	"github.com/spillway-ml/spillway/comm/algo"
)

// algorithm is the asked-for algorithm of collectives; Auto where nothing is.
func (c *Config) algorithm() algo.Name {
	a, err := algo.Parse(c.Collectives)
	if err != nil {
		return algo.Auto // Validate has refused it, but for ""
	}
	return a
}

// ringNote says that a ring is outside what holds of every other algorithm. Two summands
// have one order.
func ringNote(c *Config) []string {
	if c.algorithm() != algo.Ring || c.Ranks <= 2 {
		return nil
	}
	return []string{"with Config.Collectives ring the last bits may differ from those of the other algorithms, and between stages: a ring begins the sum of each part at another rank"}
}

func validCollectives(c *Config) error {
	if c.Collectives == "" {
		return nil
	}
	a, err := algo.Parse(c.Collectives)
	switch own := a == algo.Auto || a == algo.Direct; {
	case err != nil:
		return refuse("Config.Collectives %w", err)
	case strings.EqualFold(c.Device, "cuda") && !own:
		return refuse("Config.Collectives %s with Config.Device cuda: the ranks of a GPU have their own way alone; leave it out", a)
	case a == algo.Ring && c.Reproducible:
		return refuse("Config.Collectives ring with Config.Reproducible: a ring begins the sum of each part at another rank, so its bits depend on the number of ranks; choose another algorithm")
	}
	return nil
}

// perHost is how many neighbouring ranks each host of the run has: of a job over
// processes as they say themselves.
func (c *Config) perHost() int {
	if c.job == nil {
		return c.Ranks
	}
	return c.PerHost
}
