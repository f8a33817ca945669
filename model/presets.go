package model

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/internal/nearest"
)

// Preset is a published model's shape, without weights.
type Preset struct {
	Name    string   // as listed; lower case
	Aliases []string // other names that LookupPreset accepts; lower case
	Config  Config
	Source  string // where the shape was published
}

// Presets returns every preset, by family and size. The caller may change the slice.
func Presets() (all []Preset) {
	for _, a := range archs {
		for _, p := range a.Presets {
			all = append(all, p.clone())
		}
	}
	return all
}

func (p Preset) clone() Preset {
	p.Aliases = slices.Clone(p.Aliases)
	if s := p.Config.RopeScaling; s != nil {
		r := *s
		p.Config.RopeScaling = &r
	}
	return p
}

// LookupPreset finds a preset by its name or an alias, in any case; an underscore counts as a
// hyphen. The error for an unknown name lists the nearest ones.
func LookupPreset(name string) (Preset, error) {
	key := strings.ReplaceAll(strings.ToLower(strings.TrimSpace(name)), "_", "-")
	for _, a := range archs {
		for _, p := range a.Presets {
			if p.Name == key || slices.Contains(p.Aliases, key) {
				return p.clone(), nil
			}
		}
	}
	return Preset{}, fmt.Errorf("model %q is neither a preset nor a folder; the nearest presets are %s", name, strings.Join(nearestPresets(key, 3), ", "))
}

// NearestPreset returns the preset whose name is nearest to that of a model on a hub, such as
// Meta-Llama-3-8B; "" if none is near.
func NearestPreset(name string) string {
	key := strings.ReplaceAll(strings.ToLower(name), "_", "-")
	best := nearestPresets(key, 1)
	if len(best) == 0 || nearest.Distance(key, best[0]) > len(key)/3+1 {
		return ""
	}
	return best[0]
}

// nearestPresets returns the names of the n presets that are most like key.
func nearestPresets(key string, n int) []string {
	var entries [][]string
	for _, a := range archs {
		for _, p := range a.Presets {
			entries = append(entries, append([]string{p.Name}, p.Aliases...))
		}
	}
	return nearest.Names(key, entries, n)
}
