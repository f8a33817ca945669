package train

import (
	"reflect"
	"sync"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
)

// shared is what plans of one command or search have in common: forward programs,
// and what the passes make of them.
type shared struct {
	plan.Shared
	mu     sync.Mutex
	models []*forward // the latest last
}

// forward is one forward program.
type forward struct {
	config     model.Config
	kind       model.Kind
	batch, seq int
	once       sync.Once
	p          *graph.Program
	err        error
}

// keptModels is how many forward programs are kept at most.
const keptModels = 8

// Sharing returns the configuration, whose plans and those of its copies share what
// they have in common: for a command or a program that plans several. What they share
// is held as long as one of the copies is there.
func (cfg Config) Sharing() Config {
	if cfg.shared == nil {
		cfg.shared = &shared{}
	}
	return cfg
}

// model is model.Build; the program is not to be changed.
func (sh *shared) model(c model.Config, kind model.Kind, batch, seq int) (*graph.Program, error) {
	if sh == nil {
		return model.Build(c, kind, batch, seq)
	}
	f := sh.forward(c, kind, batch, seq)
	f.once.Do(func() { f.p, f.err = model.Build(c, kind, batch, seq) })
	return f.p, f.err
}

func (sh *shared) forward(c model.Config, kind model.Kind, batch, seq int) *forward {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	for _, f := range sh.models {
		if f.kind == kind && f.batch == batch && f.seq == seq && reflect.DeepEqual(f.config, c) {
			return f
		}
	}
	f := &forward{config: c, kind: kind, batch: batch, seq: seq}
	sh.models = append(sh.models[max(0, len(sh.models)+1-keptModels):], f)
	return f
}
