package train

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/plan"
)

// chooseRecompute replaces --recompute auto by what it comes to on a machine:
// the buffers that are computed again, by name. It does the same everywhere that
// the configuration and the machine's rates are the same. The forecast is that
// of the choice, where it was planned whole; otherwise nil.
func chooseRecompute(cfg *Config, m *cost.Machine) (*Forecast, error) {
	if !cfg.recomputeAuto() {
		return nil, nil
	}
	cfg.Recompute = "none"
	s, err := newSearcher(*cfg, m, true, nil)
	if err != nil {
		return nil, err
	}
	b := cfg.asBase()
	set, err := s.moves(b)
	if err != nil {
		return nil, err
	}
	from := s.measure(s.plain(b, set))
	if from.err != nil {
		return nil, from.err
	}
	if cfg.DeviceMemory == 0 {
		cfg.Auto = "nothing is computed again: there is no cap on device memory (--device-memory)"
		return nil, nil
	}
	found := s.climb(b, set, onDevice, margins{}, math.Inf(1))
	if len(found) == 0 {
		cfg.Recompute = "full"
		cfg.Auto = "everything is computed again, and that alone does not make it fit"
		return nil, nil
	}
	slices.SortStableFunc(found, comparePoints)
	f, at, _ := s.confirm(found)
	if f == nil {
		cfg.Recompute = "full"
		cfg.Auto = "everything is computed again: with less it does not fit"
		return nil, nil
	}
	cfg.Recompute = f.Config.Recompute
	if cfg.Recompute == "none" {
		cfg.Auto = fmt.Sprintf("nothing needs to be computed again: %s of the cap of %s", plan.Bytes(f.Plan.Layout.Spaces[0].Peak+cfg.Outside[0]), plan.Bytes(cfg.DeviceMemory))
		f.Config.Auto = cfg.Auto
		return f, nil
	}
	saved, names, all := 0.0, 0, 0
	for i := range set.moves {
		mv := &set.moves[i]
		n := mv.layers(s.layers)
		all += n
		if at.x[i] > 0 {
			k := layersOf(at.x[i], n)
			names += k
			saved += mv.bytes * float64(k) / float64(n)
		}
	}
	cfg.Auto = fmt.Sprintf("%d of %d activations are computed again (%s), for %+.1f %% of the predicted step: --recompute %s", names, all, plan.Bytes(int64(saved)),
		100*(f.Step.Seconds/from.seconds-1), quote(cfg.Recompute))
	f.Config.Auto = cfg.Auto
	return f, nil
}

// quote writes a flag's value as a shell takes it.
func quote(v string) string {
	if strings.ContainsAny(v, "*?[{;&|<>() $`\"\\") {
		return "'" + v + "'"
	}
	return v
}
