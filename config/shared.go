package config

import (
	"reflect"
	"sync"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
)

// Shared is what plans of one command or search have in common: forward programs,
// and what the passes make of them.
type Shared struct {
	plan.Shared
	mu     sync.Mutex
	models []*forward // the latest last
}

// modelKey says which forward program is meant.
type modelKey struct {
	config     model.Config
	own        *Model // in place of config; nil: that
	kind       model.Kind
	batch, seq int
}

// forward is one forward program.
type forward struct {
	key  modelKey
	once sync.Once
	p    *graph.Program
	err  error
}

// keptModels is how many forward programs are kept at most.
const keptModels = 8

// Sharing returns the configuration, whose plans and those of its copies share what
// they have in common: for a command or a program that plans several. What they share
// is held as long as one of the copies is there.
func (cfg Config) Sharing() Config {
	if cfg.shared == nil {
		cfg.shared = &Shared{}
	}
	return cfg
}

// Common is what the plans of this configuration's copies have in common; new where it
// has none yet.
func (cfg *Config) Common() *Shared {
	if cfg.shared == nil {
		return &Shared{}
	}
	return cfg.shared
}

// Model is model.Build; the program is not to be changed.
func (sh *Shared) Model(c model.Config, kind model.Kind, batch, seq int) (*graph.Program, error) {
	f := sh.forward(modelKey{config: c, kind: kind, batch: batch, seq: seq})
	f.once.Do(func() { f.p, f.err = model.Build(c, kind, batch, seq) })
	return f.p, f.err
}

// Own is the program of a model that is no model.Config.
func (sh *Shared) Own(m *Model, kind model.Kind, batch, seq int) (*graph.Program, error) {
	f := sh.forward(modelKey{own: m, kind: kind, batch: batch, seq: seq})
	f.once.Do(func() { f.p, f.err = m.build(kind, batch, seq) })
	return f.p, f.err
}

// forward is the place for a program, where there is one already that one.
func (sh *Shared) forward(want modelKey) *forward {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	for _, f := range sh.models {
		if reflect.DeepEqual(f.key, want) {
			return f
		}
	}
	f := &forward{key: want}
	sh.models = append(sh.models[max(0, len(sh.models)+1-keptModels):], f)
	return f
}
