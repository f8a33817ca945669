package receipt

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"slices"
)

// Format is the version of the format that this package writes.
const Format = 1

// Record is one line: a start or resume of the run, or some steps, with the states after it.
type Record struct {
	Prev string `json:"prev"` // SHA-256 of the line before; "" in the first line
	Step int    `json:"step"` // steps done
	// Run, in the line of a start or a resume, is what the results of the following steps
	// depend on.
	Run *Run `json:"run,omitempty"`
	// Steps are the steps since the line before.
	Steps  []Step `json:"steps,omitempty"`
	Sample int64  `json:"sample"` // rows of the data seen so far
	// Skipped is the number of steps so far without an update. LossScale, in fp16 only, is the
	// scale of the next step and the number of updates since it changed.
	Skipped   int         `json:"skipped,omitempty"`
	LossScale *[2]float64 `json:"loss_scale,omitempty"`
	Saved     bool        `json:"saved,omitempty"` // a checkpoint follows, unless a later line's Unsaved has this step
	// Async says that the checkpoint is written while later steps run. It is durable once the line of
	// another checkpoint follows.
	Async bool `json:"async,omitempty"`
	// Unsaved are the steps of earlier lines whose checkpoints could not be saved.
	Unsaved []int    `json:"unsaved,omitempty"`
	Root    string   `json:"root"`   // root hash of the states
	Ranges  [][]byte `json:"ranges"` // by tensor of the newest Run, the hashes of the tensor's ranges
}

// Run is everything that the results of a run depend on. It leaves out where and how they are
// computed.
type Run struct {
	Format   int    `json:"format"`
	Spillway string `json:"spillway"` // the version that ran it
	// Config has fields of the Config, by name. For a reproducible run the number of ranks is
	// left out.
	Config map[string]json.RawMessage `json:"config"`
	// Own names the model and optimizer that the program itself provided.
	Own        []string       `json:"own,omitempty"`
	Model      map[string]any `json:"model,omitempty"`
	Program    string         `json:"program"` // SHA-256 of the forward of a micro-batch, before it is sharded
	Data       Data           `json:"data"`
	Epochs     int            `json:"epochs"`     // the version by which epochs are shuffled, see data.Epochs
	Arithmetic string         `json:"arithmetic"` // what affects the last bits in addition to the Config
	Every      int            `json:"every"`      // steps between lines
	Tensors    []Tensor       `json:"tensors"`
	Left       *Left          `json:"left,omitempty"` // in a resume: the lines that were removed
}

// Data is the fingerprint of the data.
type Data struct {
	Tokens int64  `json:"tokens"`
	SHA256 string `json:"sha256"`
}

func (d Data) String() string {
	return fmt.Sprintf("%d tokens of SHA-256 %.16s…", d.Tokens, d.SHA256)
}

// Left describes what a resume removed: lines for steps after the checkpoint, which are run
// again.
type Left struct {
	Step int    `json:"step"` // step of the last removed line
	Hash string `json:"hash"` // of that line
}

// Step is a step of the run.
type Step struct {
	Data     string  `json:"data"`    // SHA-256 over the hashes of its rows
	Targets  int64   `json:"targets"` // number of counted targets
	LR       float64 `json:"lr"`
	Loss     string  `json:"loss"`      // its bits: see Bits32
	GradNorm string  `json:"grad_norm"` // see Bits64
	Skipped  bool    `json:"skipped,omitempty"`
}

// notFinite replaces the bits of non-finite values: which non-finite value results depends on
// the order of sums.
const notFinite = "not finite"

// Bits32 formats the bits of a loss.
func Bits32(v float32) string {
	if math.IsNaN(float64(v)) || math.IsInf(float64(v), 0) {
		return notFinite
	}
	return fmt.Sprintf("%08x", math.Float32bits(v))
}

// Bits64 formats the bits of a norm.
func Bits64(v float64) string {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return notFinite
	}
	return fmt.Sprintf("%016x", math.Float64bits(v))
}

// Differs describes the first difference between a step and the record; "" if there is none.
func (s *Step) Differs(recorded *Step) string {
	shown := func(what string, got, want any) string { return fmt.Sprintf("%s %v, recorded %v", what, got, want) }
	switch {
	case s.Data != recorded.Data:
		return shown("samples of SHA-256", s.Data[:16]+"…", fmt.Sprintf("%.16s…", recorded.Data))
	case s.Targets != recorded.Targets:
		return shown("targets", s.Targets, recorded.Targets)
	case math.Float64bits(s.LR) != math.Float64bits(recorded.LR):
		return shown("learning rate", s.LR, recorded.LR)
	case s.Loss != recorded.Loss:
		return shown("loss of bits", s.Loss, fmt.Sprintf("%.16s", recorded.Loss))
	case s.GradNorm != recorded.GradNorm:
		return shown("gradient norm of bits", s.GradNorm, fmt.Sprintf("%.16s", recorded.GradNorm))
	case s.Skipped != recorded.Skipped:
		return shown("update skipped", s.Skipped, recorded.Skipped)
	}
	return ""
}

// HashOf returns the hash of a line, which the next line records as Prev.
func HashOf(line []byte) string {
	sum := sha256.Sum256(line)
	return hex.EncodeToString(sum[:])
}

// check verifies that a line that follows others can come from a run. run is the newest Run,
// nil before the first, and at is the step of the line before.
func (r *Record) check(run *Run, at int) error {
	switch {
	case run == nil:
		return fmt.Errorf("it is no start of a run")
	case run.Format != Format:
		return fmt.Errorf("it is of format %d, and this version reads format %d", run.Format, Format)
	case r.Run == nil && (len(r.Steps) == 0 || r.Step-len(r.Steps) != at):
		return fmt.Errorf("it has %d steps up to step %d, behind step %d", len(r.Steps), r.Step, at)
	case r.Run != nil && (r.Step < at || len(r.Steps) > 0):
		return fmt.Errorf("the run goes on after step %d, behind step %d", r.Step, at)
	case slices.ContainsFunc(r.Unsaved, func(step int) bool { return step < 1 || step > at }):
		return fmt.Errorf("it says of the steps %v that they are not saved, behind step %d", r.Unsaved, at)
	case len(r.Ranges) != len(run.Tensors):
		return fmt.Errorf("it has hashes of %d states for %d", len(r.Ranges), len(run.Tensors))
	}
	for i := range run.Tensors {
		t := &run.Tensors[i]
		if t.Elems < 0 || t.Elems > math.MaxInt64/Size || t.Ranges()*Size != int64(len(r.Ranges[i])) {
			return fmt.Errorf("it has %d bytes of hashes of %s, which has %d elements", len(r.Ranges[i]), t.String(), t.Elems)
		}
	}
	if root := Root(run.Tensors, r.Ranges); root != r.Root {
		return fmt.Errorf("its root is %.80q, and its hashes have %s", r.Root, root)
	}
	return nil
}
