package train

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/hfconfig"
	"github.com/spillway-ml/spillway/internal/hfmodel"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/zero"
)

// build validates cfg, fills in what depends on the model, and plans.
func build(cfg *Config) (*plan.Plan, hfconfig.Config, error) { return buildPlan(cfg, whole) }

// depth is how far a configuration is planned.
type depth int

const (
	whole  depth = iota
	early        // as whole, but a *plan.DoesNotFit where the largest sum of live buffers is over a cap
	bounds       // lower bounds of the peaks alone, fit or not
)

// buildPlan is build to a depth.
func buildPlan(cfg *Config, to depth) (*plan.Plan, hfconfig.Config, error) {
	var none hfconfig.Config
	if err := cfg.Validate(); err != nil {
		return nil, none, err
	}
	if _, err := chooseRecompute(cfg, plannedHardware(cfg).Machine(cfg.Ranks)); err != nil {
		return nil, none, err
	}
	fwd, conf, h, err := passesOf(cfg)
	if err != nil {
		return nil, none, err
	}
	conf.Early, conf.BoundsOnly = to == early, to == bounds
	p, err := cfg.plans().Build(fwd, conf)
	if err != nil {
		return nil, h, err
	}
	p.Config.Outside = cfg.outside(p)
	if to == whole {
		err = cfg.stage(p)
	}
	return p, h, err
}

// passesOf turns cfg into what the passes take, and fills in what depends on the
// model.
func passesOf(cfg *Config) (fwd plan.Forward, conf plan.Config, h hfconfig.Config, err error) {
	h, err = modelConfig(cfg.Model)
	if err != nil {
		return fwd, conf, h, err
	}
	if cfg.Seq == 0 {
		cfg.Seq = min(256, h.Positions)
	}
	if cfg.Seq > h.Positions {
		return fwd, conf, h, fmt.Errorf("--seq %d is over the model's %d positions", cfg.Seq, h.Positions)
	}
	if cfg.Tokenizer == "" && cfg.readsText() {
		cfg.Tokenizer = modelTokenizer(cfg, h.Vocab)
	}
	if cfg.layers > 0 {
		h.Layers = cfg.layers
	}
	m, err := hfmodel.Config(h)
	if err != nil {
		return fwd, conf, h, fmt.Errorf("--model %s: %w", cfg.Model, err)
	}
	m.EmbdDropout, m.ResidDropout = cfg.Dropout, cfg.Dropout
	if m.Family == model.Llama && cfg.Dropout > 0 {
		return fwd, conf, h, fmt.Errorf("--dropout %g with a Llama: the architecture has no dropout; leave it out", cfg.Dropout)
	}
	if fwd.Train, err = cfg.shared.model(m, model.Train, cfg.Batch, cfg.Seq); err != nil {
		return fwd, conf, h, err
	}
	if cfg.EvalData != "" {
		if fwd.Eval, err = cfg.shared.model(m, model.Eval, cfg.Batch, cfg.Seq); err != nil {
			return fwd, conf, h, err
		}
	}
	if cfg.Generate {
		if err = buildGeneration(&fwd, m, cfg); err != nil {
			return fwd, conf, h, err
		}
	}
	again, err := recompute.Parse(cfg.Recompute)
	if err != nil {
		return fwd, conf, h, err
	}
	away, err := offload.Parse(cfg.Offload)
	if err != nil {
		return fwd, conf, h, err
	}
	away.Chunk = cfg.offloadChunk
	prec, err := precision.Parse(cfg.precision())
	if err != nil {
		return fwd, conf, h, err
	}
	if away.Chunk == 0 && away.Active() {
		away.Chunk = offloadChunk(fwd.Train, cfg)
	}
	freeze := cfg.Freeze
	if cfg.Inference {
		freeze = []string{"*"}
	}
	outside := cfg.Outside
	if cfg.FrozenCache.Bytes > 0 {
		outside[cfg.FrozenCache.Tier] += cfg.FrozenCache.Bytes
	}
	conf = plan.Config{
		Ranks: cfg.Ranks, Stage: zero.Stage(cfg.Zero), Accum: cfg.Accum, LayerOrder: cfg.inLayers(), Reproducible: cfg.Reproducible, Prefetch: cfg.Prefetch,
		Recompute: again, Offload: away, Freeze: freeze, Optimizer: cfg.optimizer(), Clip: cfg.Clip, Target: cfg.target(),
		Capacity:      [graph.NumSpaces]int64{graph.Device: cfg.DeviceMemory, graph.Host: cfg.HostMemory, graph.Disk: cfg.DiskMemory},
		SkipNonFinite: cfg.skipsNonFinite(),
		Precision:     prec, Reduce32: cfg.reduce32(), ShardSize: cfg.ShardSize,
		Int8Gather: cfg.int8("gather"), Int8Reduce: cfg.int8("reduce"),
		Int8:        precision.Int8{Activations: cfg.int8("activations"), Matmul: cfg.int8("matmul")},
		CachePrefix: cfg.FrozenCache.Bytes > 0, Rows: int64(cfg.Batch),
		Outside: outside,
		Verify:  cfg.Poison,
	}
	return fwd, conf, h, nil
}

// buildGeneration adds the programs of generation. Keys and values are kept where
// there are kernels for it: on the CPU in fp32. Elsewhere each token is a forward
// over all.
func buildGeneration(fwd *plan.Forward, m model.Config, cfg *Config) (err error) {
	kind := model.Generate
	if !cfg.wholeGeneration && strings.EqualFold(cfg.precision(), "fp32") && cfg.target().Name == graph.CPUTarget().Name {
		kind = model.Prompt
		if fwd.Next, err = cfg.shared.model(m, model.Next, 1, cfg.Seq); err != nil {
			return err
		}
	}
	fwd.Generate, err = cfg.shared.model(m, kind, 1, cfg.Seq)
	return err
}

// chunksOfUnit is how many chunks of a unit's states pass through the host at
// most. It bounds the program: at stage 0 of a 405B model, chunks of the default
// size make a million operations.
const chunksOfUnit = 64

// offloadChunk returns the elements of a chunk, 0 for the default.
func offloadChunk(p *graph.Program, cfg *Config) int64 {
	units := make([]int64, len(p.Units))
	for i := range p.Params {
		units[p.Params[i].Unit] += p.Params[i].Elems()
	}
	shards := int64(1)
	if zero.Stage(cfg.Zero).ShardsStates() {
		shards = int64(cfg.Ranks)
		if cfg.ShardSize > 0 {
			shards = int64(cfg.ShardSize)
		}
	}
	const multiple = 1024 // offload.Options.Chunk's
	chunk := (slices.Max(units)/shards/chunksOfUnit + multiple - 1) / multiple * multiple
	if chunk <= offload.DefaultChunk {
		return 0
	}
	return chunk
}
