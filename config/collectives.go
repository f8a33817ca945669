package config

import (
	"strings"

	"github.com/spillway-ml/spillway/comm/algorithm"
)

// Algorithm returns the configured algorithm of collectives; Auto if none is configured.
func (c *Config) Algorithm() algorithm.Name {
	a, err := algorithm.Parse(c.Collectives)
	if err != nil {
		return algorithm.Auto // Validate has refused all invalid names; "" means auto
	}
	return a
}

// RingNote returns the note that a ring gives other bits than the other algorithms. With two
// summands the order makes no difference.
func RingNote(c *Config) []string {
	if c.Algorithm() != algorithm.Ring || c.Ranks <= 2 {
		return nil
	}
	return []string{"with Config.Collectives ring the last bits may differ from those of the other algorithms, and between stages: a ring begins the sum of each part at another rank"}
}

func validCollectives(c *Config) error {
	if c.Collectives == "" {
		return nil
	}
	a, err := algorithm.Parse(c.Collectives)
	switch own := a == algorithm.Auto || a == algorithm.Direct; {
	case err != nil:
		return Refuse("Config.Collectives %w", err)
	case strings.EqualFold(c.Device, "cuda") && !own:
		return Refuse("Config.Collectives %s with Config.Device cuda: the ranks of a GPU have their own way alone; leave it out", a)
	case a == algorithm.Ring && c.Reproducible:
		return Refuse("Config.Collectives ring with Config.Reproducible: a ring begins the sum of each part at another rank, so its bits depend on the number of ranks; choose another algorithm")
	}
	return nil
}
