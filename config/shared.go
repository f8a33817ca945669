package config

import (
	"reflect"
	"sync"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
)

// Shared caches data that the plans of one command or search have in common: forward programs, and
// results that the passes compute from them.
type Shared struct {
	plan.Shared
	mu     sync.Mutex
	models []*forward // the most recently used last
}

// modelKey identifies a forward program.
type modelKey struct {
	config     model.Config
	own        *Model // replaces config; nil: config is used
	kind       model.Kind
	batch, seq int
}

type forward struct {
	key  modelKey
	once sync.Once
	p    *graph.Program
	err  error
}

// keptModels is the maximum number of cached forward programs.
const keptModels = 8

// Sharing returns a configuration whose plans, and those of its copies, share common data. It is
// for a command or program that makes several plans. The shared data lives as long as one of the
// copies.
func (cfg Config) Sharing() Config {
	if cfg.shared == nil {
		cfg.shared = &Shared{}
	}
	return cfg
}

// Common returns the shared data of this configuration's copies, or a new, empty Shared.
func (cfg *Config) Common() *Shared {
	if cfg.shared == nil {
		return &Shared{}
	}
	return cfg.shared
}

// Model is model.Build with a cache; the program must not be changed.
func (sh *Shared) Model(c model.Config, kind model.Kind, batch, seq int) (*graph.Program, error) {
	f := sh.forward(modelKey{config: c, kind: kind, batch: batch, seq: seq})
	f.once.Do(func() { f.p, f.err = model.Build(c, kind, batch, seq) })
	return f.p, f.err
}

// Own returns the program of a program's own model, with a cache.
func (sh *Shared) Own(m *Model, kind model.Kind, batch, seq int) (*graph.Program, error) {
	f := sh.forward(modelKey{own: m, kind: kind, batch: batch, seq: seq})
	f.once.Do(func() { f.p, f.err = m.build(kind, batch, seq) })
	return f.p, f.err
}

// forward returns the cache entry for a program, and adds it if it is missing.
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

// OwnForward builds the programs of the program's own model.
func OwnForward(c *Config, sh *Shared) (fwd plan.Forward, err error) {
	if fwd.Train, err = sh.Own(c.Own.Model, model.Train, c.Batch, c.Seq); err != nil {
		return fwd, err
	}
	if c.Evaluates() {
		fwd.Eval, err = sh.Own(c.Own.Model, model.Eval, c.Batch, c.Seq)
	}
	return fwd, err
}
