package plan

import (
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/fsdp"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/nearest"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
)

// pass is one rewrite, a function from program to program. It does not change its input, unless
// takesOver is set. needs and gives are properties that the program must have before and after the
// pass. They are checked in every run; Spec.verify says when the structure is.
type pass struct {
	name         string
	run          func(p *graph.Program, s *Spec) (*graph.Program, error)
	needs, gives []property
	ordered      bool // after the pass the order of operations can be verified
	// takesOver is set if the pass does not read its input after it has cloned it. If an earlier
	// pass made the input for this plan only, Clone then returns its parts instead of copies
	// (graph.Program.Yield).
	takesOver bool
}

// passes is the complete pipeline, in order; passOrder gives the reasons for that order.
var passes = []pass{
	{"freeze", func(p *graph.Program, s *Spec) (*graph.Program, error) { return freeze(p, s.Freeze) }, has(forward, wholeParams), nil, true, false},
	{"lora", func(p *graph.Program, s *Spec) (*graph.Program, error) { return adapt(p, s.Config) }, has(forward, wholeParams), nil, true, false},
	{"differentiate", func(p *graph.Program, _ *Spec) (*graph.Program, error) { return graph.Differentiate(p) }, has(forward), has(gradients), true, false},
	{"merge", func(p *graph.Program, s *Spec) (*graph.Program, error) { return merge(p, s) }, has(forward), has(train), true, false},
	{"tensor", cutTensors, has(train, wholeParams, gradients), has(train, gradients), true, false},
	{"cast", func(p *graph.Program, s *Spec) (*graph.Program, error) { return precision.Cast(p, s.castOptions()) }, has(train, wholeParams, gradients), has(gradients), true, false},
	{"skip", skipNonFinite, has(train), has(train), true, false},
	{"fuse", fuse, has(train), has(train), true, false},
	{"int8", func(p *graph.Program, s *Spec) (*graph.Program, error) { return precision.Quantise(p, s.Int8) }, has(train, gradients), has(train, savedInt8), true, false},
	{"recompute", func(p *graph.Program, s *Spec) (*graph.Program, error) { return recompute.Rewrite(p, s.Recompute) }, has(train, gradients), has(train, savedInt8), true, false},
	{"prefix", cachePrefix, has(train), has(train), false, false}, // its copies get their events in "schedule"
	{"inputs", stageInputs, has(train), has(train, hostPorts), false, true},
	{"pipeline", intoStages, has(train, hostPorts), has(train, hostPorts), false, false},
	{"layers", layers, has(train, hostPorts), has(train), false, false},
	{"mesh", onMesh, has(wholeParams), has(onAxes), false, false},
	{"shard", func(p *graph.Program, s *Spec) (*graph.Program, error) { return fsdp.Shard(p, s.shardOptions()) }, has(train, gradients, hostPorts, onAxes), has(step, flatParams, ways, scalars), false, false},
	{"accumulate", func(p *graph.Program, _ *Spec) (*graph.Program, error) { return fsdp.Accumulate(p) }, has(step, flatParams, ways), nil, false, true},
	{"reduce", func(p *graph.Program, s *Spec) (*graph.Program, error) { return fsdp.Reduce(p, s.Prefetch) }, has(step, ways), has(reduced), false, true},
	{"unshard", func(p *graph.Program, s *Spec) (*graph.Program, error) {
		return fsdp.Unshard(p, s.Prefetch, s.Int8Gather)
	}, has(step, flatParams), has(gathered), false, true},
	{"offload", func(p *graph.Program, s *Spec) (*graph.Program, error) { return offload.Rewrite(p, s.offloadOptions()) }, has(step, flatParams, reduced, gathered), has(step, placed, reachable), false, true},
	{"sweep", func(p *graph.Program, _ *Spec) (*graph.Program, error) { return graph.Sweep(p), nil }, nil, has(noDeadBuffers), false, true},
	{"staging", func(p *graph.Program, _ *Spec) (*graph.Program, error) { return sizeStaging(p), nil }, has(flatParams, hostPorts), nil, false, true},
	{"workspace", func(p *graph.Program, s *Spec) (*graph.Program, error) { return graph.AddWorkspace(p, s.Target), nil }, has(step, reachable), nil, false, true},
	{"schedule", schedule, has(step), has(step, noThrottles), true, true},
}

// constraint says that pass before must come before pass after, and why.
type constraint struct{ before, after, why string }

var passOrder = []constraint{
	{"freeze", "differentiate", "frozen parameters have no gradient, and nothing below the lowest trainable unit a backward"},
	{"freeze", "lora", "a run that trains nothing freezes the adapters too"},
	{"lora", "differentiate", "the backward is that of the adapters alone"},
	{"differentiate", "merge", "evaluation and generation have no backward"},
	{"differentiate", "fuse", "what a fused operation must also write depends on what backward reads"},
	{"differentiate", "cast", "gradients are defined in fp32; the cast follows the values of forward and backward alike"},
	{"merge", "tensor", "every section uses the slices of the parameters"},
	{"tensor", "cast", "sums over slices have the type of what they add"},
	{"tensor", "fuse", "a product whose inputs are cut has its activation behind the sum"},
	{"tensor", "recompute", "what a slice computes again it computes from its own values, and rows are gathered again"},
	{"tensor", "pipeline", "stages send a rank's rows"},
	{"tensor", "shard", "flat parameters are of what a rank computes with"},
	{"merge", "cast", "every section computes with the 16-bit parameters"},
	{"cast", "fuse", "what fuses depends on the types"},
	{"cast", "skip", "what scales the loss skips already"},
	{"skip", "inputs", "the flag of a skipped step has a host twin"},
	{"cast", "inputs", "the loss scale has host twins"},
	{"cast", "shard", "flat parameters have the type of their parts, and masters lie in the shard"},
	{"merge", "shard", "every section that uses parameters needs their all-gathers"},
	{"cast", "int8", "int8 products stand for 16-bit ones, and what is saved has its type"},
	{"fuse", "int8", "a fused product's pre-activation is saved"},
	{"int8", "recompute", "what is computed again is quantised again: the backward reads the same"},
	{"fuse", "recompute", "a clone copies the fused operation, or its rounding would differ"},
	{"merge", "recompute", "it looks for the training section, which merging makes"},
	{"recompute", "inputs", "inputs stay for the whole micro-step; their copies are not cloned"},
	{"recompute", "shard", "a cloned use needs its own all-gather"},
	{"fuse", "shard", "fusion must not depend on the stage"},
	{"freeze", "prefix", "what is frozen does not change from step to step"},
	{"fuse", "prefix", "both forms of the step have the same operations, or their rounding would differ"},
	{"recompute", "prefix", "a clone may read a value of the beginning: then that is handed on"},
	{"prefix", "inputs", "each form copies the inputs that it reads"},
	{"prefix", "shard", "each form has its own all-gathers"},
	{"inputs", "schedule", "the copies in are ordered with everything else"},
	{"inputs", "shard", "a micro-step copies its inputs: they are there before it is repeated"},
	{"recompute", "pipeline", "what a stage makes again it makes from its own values"},
	{"inputs", "pipeline", "each stage copies the inputs that it reads"},
	{"pipeline", "layers", "the order of micro-batches is that of the stages"},
	{"pipeline", "shard", "flat parameters are of one stage"},
	{"recompute", "layers", "what a block makes again goes with each of its backward passes"},
	{"prefix", "layers", "each form of the step has all micro-batches"},
	{"inputs", "layers", "each micro-batch has its own twins in host memory"},
	{"layers", "shard", "a stretch that uses a block is one for all micro-batches, and so is what is gathered for it"},
	{"layers", "accumulate", "gradients of one phase's micro-batches add up already"},
	{"mesh", "shard", "what is sharded lies along the mesh's axes"},
	{"shard", "accumulate", "each unit has its gradients' way then, and micro-steps are told apart"},
	{"accumulate", "reduce", "a sum over micro-steps is whole before it goes over the replicas"},
	{"reduce", "unshard", "of what may start ahead at one place a gather comes first"},
	{"shard", "unshard", "what is gathered rests in shards"},
	{"reduce", "offload", "what has been reduced goes home"},
	{"unshard", "offload", "a fetch comes before its all-gather"},
	{"shard", "offload", "what moves is each rank's part, and the update's parts get their place"},
	{"recompute", "offload", "only what is kept is worth parking"},
	{"offload", "sweep", "moved and whole parameters leave buffers that nothing uses"},
	{"offload", "workspace", "scratch lies where the operation runs"},
	{"offload", "schedule", "its copies run beside computation, behind events"},
	{"sweep", "workspace", "what nothing uses needs no place"},
	{"shard", "staging", "the staging buffer is no larger than the largest resident state"},
	{"shard", "workspace", "the update's operations exist only then"},
	{"workspace", "schedule", "streams share a workspace only behind an event"},
	{"shard", "schedule", "collectives are ordered with what they move"},
}

func checkPassOrder() error {
	at := map[string]int{}
	for i, p := range passes {
		at[p.name] = i
	}
	for _, c := range passOrder {
		b, ok1 := at[c.before]
		a, ok2 := at[c.after]
		if !ok1 || !ok2 || b >= a {
			return fmt.Errorf("plan: pass %q must come before %q: %s", c.before, c.after, c.why)
		}
	}
	return nil
}

func init() {
	if err := checkPassOrder(); err != nil {
		panic(err)
	}
}

// passIndex returns the index of a pass in the table; the table's length for "".
func passIndex(name string) int {
	for i := range passes {
		if passes[i].name == name {
			return i
		}
	}
	return len(passes)
}

// rewrite runs the passes on p in order, from the pass named from up to but not including the
// one named until. An empty from is the first pass, for the forward program of a micro-batch;
// an empty until runs all.
func rewrite(s Spec, p *graph.Program, from, until string) (*graph.Program, error) {
	first := 0
	if from != "" {
		first = passIndex(from)
	}
	if s.Observe != nil && first == 0 {
		if err := s.Observe("model", p); err != nil {
			return nil, err
		}
	}
	for i := first; i < passIndex(until); i++ {
		ps := &passes[i]
		if err := s.goOn(); err != nil {
			return nil, err
		}
		if err := hold(p, ps.needs); err != nil {
			return nil, fmt.Errorf("plan: before %s: %w", ps.name, err)
		}
		if ps.takesOver && s.Observe == nil {
			p.Yield()
		}
		q, err := ps.run(p, &s)
		if err != nil {
			return nil, &passError{ps.name, err}
		}
		q.TakeBack()
		same := q == p && i > 0 // the pass changed nothing, and p was verified before
		p = q
		if err := s.verify(p, i, same); err != nil {
			return nil, fmt.Errorf("plan: after %s: %w", ps.name, err)
		}
		if s.Observe != nil {
			if err := s.Observe(ps.name, p); err != nil {
				return nil, err
			}
		}
	}
	return p, nil
}

// verify checks a program after pass i: its properties, and with Verify also its structure and, if
// the pass is ordered, the order of operations. Otherwise it checks the structure after each pass
// before "mesh": several plans share these results (stemEnds), and faults in a user's own
// operations show there. After the last pass it checks structure and order; with Early, Role.bound
// does so if the plan may fit.
//
// With BoundsOnly it checks only the properties, except for the first stem: a search that uses
// BoundsOnly builds its choice again without it. same is set if the pass changed nothing, so that
// the structure has been verified before.
func (s *Spec) verify(p *graph.Program, i int, same bool) error {
	if err := hold(p, passes[i].gives); err != nil {
		return err
	}
	last := i == len(passes)-1
	if !s.Verify && (s.BoundsOnly || (s.Early || !last) && i >= passIndex("mesh")) {
		return nil
	}
	ordered := passes[i].ordered && (s.Verify || last)
	switch {
	case ordered && !same:
		return graph.Verify(p)
	case ordered:
		return graph.VerifyOrder(p)
	case !same:
		return graph.VerifyStructure(p)
	}
	return nil
}

// passError adds the name of the failed pass to an error: not twice, and not to one that begins
// with a field of Config.
type passError struct {
	pass string
	err  error
}

func (e *passError) Error() string {
	text := e.err.Error()
	if strings.HasPrefix(text, "Config.") {
		return text
	}
	return "plan: " + e.pass + ": " + strings.TrimPrefix(text, e.pass+": ")
}
func (e *passError) Unwrap() error { return e.err }

func cachePrefix(p *graph.Program, s *Spec) (*graph.Program, error) {
	if !s.CachePrefix {
		return p, nil
	}
	return recompute.CachePrefix(p, s.Rows)
}

// fuse joins operations for which the target has fused kernels. Fusions that change bits are
// done only if the run has chosen them (Config.Epilogues). Products of int8 have no epilogues.
func fuse(p *graph.Program, s *Spec) (*graph.Program, error) {
	var e graph.Epilogues
	if !s.Int8.Matmul {
		e = s.Target.Epilogues(s.Epilogues)
	}
	var unrounded []graph.ActKind
	if e.Has(graph.EpilogueGELU) {
		unrounded = append(unrounded, s.Target.CUDA.Activation)
	}
	p = graph.Fuse(p, unrounded...)
	if e.Has(graph.EpilogueDGELU) {
		p = graph.FuseGradients(p, s.Target.CUDA.Activation)
	}
	if e.Has(graph.EpilogueBGrad) {
		p = graph.FuseBiasGradients(p)
	}
	return p, nil
}

func skipNonFinite(p *graph.Program, s *Spec) (*graph.Program, error) {
	if !s.SkipNonFinite {
		return p, nil
	}
	return precision.SkipNonFinite(p), nil
}

// onMesh sets the program's mesh. The result shares everything else with p, so later passes must
// clone it before they change anything. With slices the mesh is set already. Their collectives,
// until now on the compute stream so that passes need no events to see their order, then move to
// the stream of all collectives.
func onMesh(p *graph.Program, s *Spec) (*graph.Program, error) {
	if s.Slices > 0 {
		q := p.Clone()
		return q, eachOp(q, func(op *graph.Op) error {
			if _, is := op.Attr.(graph.GroupAttr); is {
				op.Stream = graph.Comm
			}
			return nil
		})
	}
	q := *p
	q.Mesh = s.mesh()
	return &q, nil
}

func (c Config) offloadOptions() offload.Options {
	o := c.Offload
	o.Ahead = c.Prefetch
	return o
}

// freeze marks the parameters whose names match the patterns as frozen.
func freeze(p *graph.Program, patterns []string) (*graph.Program, error) {
	q := p.Clone()
	for _, pattern := range patterns {
		if pattern != "" { // an empty pattern matches no name
			if err := graph.CheckPattern(pattern); err != nil {
				return nil, Refused(err)
			}
		}
		if n, err := graph.Freeze(q, pattern); err != nil {
			if n > 0 {
				return nil, err
			}
			names := make([]string, len(q.Params))
			for i := range q.Params {
				names[i] = q.Params[i].Name
			}
			return nil, Refused(fmt.Errorf("no parameter matches %q; the nearest are %s",
				pattern, strings.Join(nearest.Patterns(pattern, names, 3), ", ")))
		}
	}
	return q, nil
}

// adapt adds the LoRA adapters of cfg to a program and freezes the parameters that match
// cfg.Freeze.
func adapt(p *graph.Program, cfg Config) (*graph.Program, error) {
	if !cfg.LoRA.Active() {
		return p, nil
	}
	q, err := lora.Adapt(p, cfg.LoRA)
	if err != nil {
		return nil, err
	}
	return freeze(q, cfg.Freeze)
}

// merge adds evaluation and generation as sections. They use the training section's parameters,
// including adapters.
func merge(p *graph.Program, s *Spec) (*graph.Program, error) {
	q := p.Clone()
	if len(q.Sections) != 1 {
		return nil, fmt.Errorf("the training program has %d sections, 1 is needed", len(q.Sections))
	}
	q.Sections[0].Become(graph.SectionTrain)
	forwards := s.Config
	forwards.LoRA.Dropout = 0
	for _, add := range []struct {
		of   *graph.Program
		kind graph.SectionKind
	}{{s.Forward.Eval, graph.SectionEval}, {s.Forward.Generate, graph.SectionGenerate}, {s.Forward.Next, graph.SectionGenerate}} {
		if add.of == nil {
			continue
		}
		of, err := adapt(add.of, forwards)
		if err != nil {
			return nil, err
		}
		if q, err = graph.Merge(q, of, add.kind); err != nil {
			return nil, err
		}
	}
	return q, nil
}

// usedTwice returns sharedByBlocks of the training program if the plan is in layer order; nil
// otherwise.
func usedTwice(fwd Forward, cfg Config) ([]string, error) {
	if !cfg.inLayers() || cfg.Pipeline > 1 {
		return nil, nil
	}
	trained, err := freeze(fwd.Train, cfg.Freeze)
	if err == nil {
		trained, err = adapt(trained, cfg)
	}
	if err != nil {
		return nil, err
	}
	return sharedByBlocks(trained), nil
}
