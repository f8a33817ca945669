package plan

import (
	"cmp"
	"errors"
	"reflect"
	"slices"
	"sync"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
)

// Shared builds plans of related configurations. It keeps programs between passes, and reuses one
// if the passes before it would make the same program for another configuration. It also keeps the
// last plans. The zero value is ready to use, and safe for concurrent use. A nil *Shared keeps
// nothing.
//
//	model ─ freeze … fuse ─┬─ recompute … inputs ─┬─ mesh, shard … schedule   stage 0
//	                       │                      ├─ mesh, shard … unshard ─┬─ offload … schedule   stage 1
//	                       │                      │                         └─ offload … schedule
//	                       ├─ recompute … inputs ─┴─ …
//
// It is meant for one command or search: the programs stay in memory as long as it exists.
type Shared struct {
	mu    sync.Mutex
	stems [len(stemEnds)][]*stem // by last use
	plans []*Plan
	fwds  []Forward  // of plans, in the same order
	cuts  []division // the newest last

	placed memplan.Known
}

// stemEnd is a pass before which programs (stems) are kept. late resets the fields of a Config that no
// pass before that reads; fields that it does not reset are part of the key.
type stemEnd struct {
	before string
	keep   int // programs kept at most
	late   func(c *Config)
}

// The last of stemEnds is for searches: many of their candidates differ only in what is offloaded.
var stemEnds = [...]stemEnd{
	{"recompute", 8, func(c *Config) {
		if c.Slices == 0 { // otherwise the mesh is set before
			c.Ranks, c.ShardSize = 0, 0
		}
		c.Accum, c.LayerOrder, c.Recompute, c.CachePrefix, c.Rows = 0, false, recompute.Options{}, false, 0
		c.Stages = nil
		afterMesh(c)
	}},
	{"mesh", 2, afterMesh},
	{"offload", 4, func(c *Config) {
		var none Config
		c.Offload = none.Offload
		limits(c)
	}},
}

// afterMesh resets the fields that decide how ranks share the work and how much memory they have.
// The pass "cast" depends on the stage only through whether gradients are fp32, which is a separate
// part of the stem's key.
func afterMesh(c *Config) {
	var none Config
	if !c.inLayers() && !c.Noise { // layer order and noise read Reproducible before the mesh is set
		c.Reproducible = false
	}
	c.Shares, c.Shapes, c.Serial = nil, nil, false
	c.Stage, c.Prefetch, c.Offload = none.Stage, 0, none.Offload
	limits(c)
}

// limits resets the fields that no pass reads.
func limits(c *Config) {
	var none Config
	c.Capacity, c.Outside, c.Early, c.BoundsOnly, c.Verify, c.Observe, c.Stop = none.Capacity, none.Outside, false, false, false, nil, nil
	c.Dividing = nil
}

// keptPlans is the number of plans that are kept: one for each of the four ZeRO stages.
const keptPlans = 4

// division is the result of dividing a program's layers over pipeline stages, with the settings on
// which it depends.
type division struct {
	fwd      Forward
	key      Config // see stemKey
	cast     precision.Options
	dividing *cost.Machine
	stages   []int
}

// keptDivisions is the number of divisions that are kept, for the candidates of a search.
const keptDivisions = 8

// divided returns the result of divide, the first layer of each stage. It uses that of an earlier
// call with the same settings, if there is one.
func (sh *Shared) divided(s Spec, divide func() ([]int, error)) ([]int, error) {
	if sh == nil {
		return divide()
	}
	d := division{fwd: s.Forward, dividing: s.Dividing}
	d.key, d.cast = stemKey(slices.IndexFunc(stemEnds[:], func(e stemEnd) bool { return e.before == "mesh" }), &s)
	sh.mu.Lock()
	at := slices.IndexFunc(sh.cuts, func(o division) bool {
		return o.fwd == d.fwd && o.cast == d.cast && o.dividing == d.dividing && reflect.DeepEqual(o.key, d.key)
	})
	if at >= 0 {
		d = sh.cuts[at]
	}
	sh.mu.Unlock()
	if at >= 0 {
		return d.stages, nil
	}
	var err error
	if d.stages, err = divide(); err != nil {
		return nil, err
	}
	sh.mu.Lock()
	defer sh.mu.Unlock()
	sh.cuts = append(sh.cuts, d)
	if n := len(sh.cuts) - keptDivisions; n > 0 {
		sh.cuts = slices.Delete(sh.cuts, 0, n)
	}
	return d.stages, nil
}

// stem is a program that is kept: the result of the passes before one of stemEnds.
type stem struct {
	fwd  Forward
	key  Config // with the fields reset that those passes do not read
	cast precision.Options
	once sync.Once
	p    *graph.Program
	err  error

	bounds   bool // it was made for lower bounds, and its structure was not verified
	verified sync.Once
	wrong    error // error of that later verification
}

// stemKey returns the settings on which the program before the k-th of stemEnds depends.
func stemKey(k int, s *Spec) (Config, precision.Options) {
	key := s.Config
	stemEnds[k].late(&key)
	if key.Precision == precision.FP32 {
		return key, precision.Options{}
	}
	return key, s.castOptions()
}

// Build is like the function Build, but reuses earlier programs and plans.
func (sh *Shared) Build(fwd Forward, cfg Config) (*Plan, error) {
	cfg, err := sh.ready(fwd, cfg)
	if err != nil {
		return nil, err
	}
	if known := sh.known(fwd, cfg); known != nil {
		return known, nil
	}
	spec, until := Spec{cfg, fwd}, ""
	if spec.stages() > 1 {
		until = "schedule" // each role runs this pass separately
	}
	p, err := sh.rewrite(spec, until)
	if err == nil {
		err = cfg.goOn()
	}
	if err != nil {
		return nil, err
	}
	made := &Plan{Config: cfg, Program: p}
	made.Config.Stop = nil // the plan outlives the caller of Build
	if made.Roles, err = spec.roles(p); err != nil {
		return nil, err
	}
	for i := range made.Roles {
		r := &made.Roles[i]
		r.CommBytes = CommBytes(r.Program)
		made.CommBytes = max(made.CommBytes, r.CommBytes)
	}
	if made.UsedTwice, err = usedTwice(fwd, cfg); err != nil {
		return nil, err
	}
	var placed *memplan.Known
	if sh != nil {
		placed = &sh.placed
	}
	if err := made.place(cfg, placed); err != nil {
		return nil, err
	}
	if !cfg.BoundsOnly {
		sh.remember(fwd, made)
	}
	return made, nil
}

// Candidates lists the activations that the forward keeps for the backward, which a search
// may recompute or offload instead. It also returns the program whose buffers they name.
func (sh *Shared) Candidates(fwd Forward, cfg Config) (*graph.Program, []recompute.Candidate, error) {
	if err := cfg.Validate(); err != nil {
		return nil, nil, err
	}
	p, err := sh.rewrite(Spec{cfg, fwd}, "recompute")
	if err != nil {
		return nil, nil, err
	}
	list, err := recompute.Candidates(p)
	return p, list, err
}

// known returns a plan that was built for a configuration that differs at most in its caps. It
// returns nil if there is none, or if the plan exceeds the caps and Early is set.
func (sh *Shared) known(fwd Forward, cfg Config) *Plan {
	if sh == nil || cfg.BoundsOnly || cfg.Verify || cfg.Observe != nil {
		return nil
	}
	key := cfg
	limits(&key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	for i, pl := range sh.plans {
		of := pl.Config
		limits(&of)
		if sh.fwds[i] != fwd || !reflect.DeepEqual(of, key) {
			continue
		}
		again := *pl
		again.Config = cfg
		again.Config.Stop = nil
		if cfg.Early && overBound(pl.Layout.Spaces, cfg) != nil {
			return nil // Build returns the *DoesNotFit
		}
		return &again
	}
	return nil
}

func (sh *Shared) remember(fwd Forward, pl *Plan) {
	if sh == nil || pl.Config.Observe != nil {
		return
	}
	mine := *pl
	sh.mu.Lock()
	defer sh.mu.Unlock()
	sh.plans, sh.fwds = append(sh.plans, &mine), append(sh.fwds, fwd)
	if n := len(sh.plans) - keptPlans; n > 0 {
		sh.plans, sh.fwds = slices.Delete(sh.plans, 0, n), slices.Delete(sh.fwds, 0, n)
	}
}

// rewrite runs the passes up to the one named until ("": all), starting from the latest stem
// that fits.
func (sh *Shared) rewrite(s Spec, until string) (*graph.Program, error) {
	if sh == nil || s.Observe != nil {
		return rewrite(s, s.Forward.Train, "", until)
	}
	k := len(stemEnds) - 1
	if !s.BoundsOnly {
		k--
	}
	for k >= 0 && until != "" && passIndex(stemEnds[k].before) > passIndex(until) {
		k--
	}
	if k < 0 {
		return rewrite(s, s.Forward.Train, "", until)
	}
	p, err := sh.stem(k, s)
	if err != nil {
		return nil, err
	}
	return rewrite(s, p, stemEnds[k].before, until)
}

// stem returns the program before the k-th of stemEnds.
func (sh *Shared) stem(k int, s Spec) (*graph.Program, error) {
	key, cast := stemKey(k, &s)
	sh.mu.Lock()
	list := &sh.stems[k]
	at := slices.IndexFunc(*list, func(st *stem) bool {
		return st.fwd == s.Forward && st.cast == cast && reflect.DeepEqual(st.key, key)
	})
	if at < 0 {
		*list = append(*list, &stem{fwd: s.Forward, key: key, cast: cast})
	} else { // move it to the end: the list is ordered by last use
		st := (*list)[at]
		*list = append(slices.Delete(*list, at, at+1), st)
	}
	st := (*list)[len(*list)-1]
	if n := len(*list) - stemEnds[k].keep; n > 0 {
		*list = slices.Delete(*list, 0, n)
	}
	sh.mu.Unlock()
	st.once.Do(func() {
		from, p := "", s.Forward.Train
		if k > 0 {
			from = stemEnds[k-1].before
			if p, st.err = sh.stem(k-1, s); st.err != nil {
				return
			}
		}
		if k == 0 { // faults in a user's own operations show here, in every search
			s.BoundsOnly = false
		}
		st.bounds = s.BoundsOnly
		if st.p, st.err = rewrite(s, p, from, stemEnds[k].before); st.err == nil {
			st.p.Keep()
		}
	})
	var left *stopped
	if errors.As(st.err, &left) { // the caller that made it was stopped: drop it
		sh.mu.Lock()
		*list = slices.DeleteFunc(*list, func(other *stem) bool { return other == st })
		sh.mu.Unlock()
		if s.goOn() == nil {
			return sh.stem(k, s)
		}
	}
	if st.err == nil && st.bounds && !s.BoundsOnly {
		st.verified.Do(func() { st.wrong = sh.verify(k, s, st.p) })
		return st.p, st.wrong
	}
	return st.p, st.err
}

// verify verifies the structure of the k-th stem, which was made for lower bounds, before a
// complete plan uses it. If it is wrong, the passes run again, so that the error can name one.
func (sh *Shared) verify(k int, s Spec, p *graph.Program) error {
	wrong := graph.VerifyStructure(p)
	if wrong == nil {
		return nil
	}
	before, err := sh.stem(k-1, s)
	if err == nil {
		_, err = rewrite(s, before, stemEnds[k-1].before, stemEnds[k].before)
	}
	return cmp.Or(err, wrong)
}
