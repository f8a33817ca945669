package config

import (
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// FrozenCache is the size of a cache for the outputs of a model's frozen first layers, by
// sample: later epochs skip their forward. The zero value means no cache.
type FrozenCache struct {
	Tier  graph.Space // Host or Disk
	Bytes int64       // per rank; the ranks of a process share the sum
}

func (f FrozenCache) String() string {
	if f.Bytes == 0 {
		return "none"
	}
	return fmt.Sprintf("%s:%d", f.Tier, f.Bytes)
}

// ParseFrozenCache reads "none", "host:SIZE" or "disk:SIZE"; size parses SIZE.
func ParseFrozenCache(s string, size func(string) (int64, error)) (FrozenCache, error) {
	if s == "" || strings.EqualFold(s, "none") {
		return FrozenCache{}, nil
	}
	tier, room, _ := strings.Cut(s, ":")
	var f FrozenCache
	switch strings.ToLower(tier) {
	case "host":
		f.Tier = graph.Host
	case "disk":
		f.Tier = graph.Disk
	default:
		return f, fmt.Errorf("%.80q: use none, host:SIZE or disk:SIZE", s)
	}
	example := strings.ToLower(tier) + ":4GiB"
	if room == "" {
		return FrozenCache{}, fmt.Errorf("%.80q: a size is needed after the tier, as in %s", s, example)
	}
	n, err := size(room)
	if err != nil {
		return FrozenCache{}, fmt.Errorf("%.80q: %w, as in %s", s, err, example)
	}
	if n <= 0 {
		return FrozenCache{}, fmt.Errorf("%.80q: a size of more than 0 is needed after the tier, as in %s", s, example)
	}
	f.Bytes = n
	return f, nil
}
