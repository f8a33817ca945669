// Package spillway trains models that are larger than one device: parameters,
// gradients and optimizer states sharded over ranks, every byte planned before
// the run starts.
//
//	cfg := spillway.Default()
//	cfg.Model, cfg.Data = "gpt2", "tokens.bin"
//	t, err := spillway.New(ctx, cfg)
//	…
//	defer t.Close()
//	err = t.Run(ctx, func(r spillway.StepResult) error { fmt.Println(r.Step, r.Loss); return nil })
//
// A Config says what to train; Build and Predict plan it, Fit looks for the fastest
// plan within the caps, and New runs it. The machine behind it is package train.
package spillway

import (
	"context"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/train"
)

// What a run is told, and what it tells.
type (
	// Config is everything that a training run is told. Default returns the values
	// that the command line starts from; the zero value is not valid.
	Config = train.Config
	// Own is what a program brings along: a model, data, an optimizer, a schedule.
	Own = train.Own
	// Model is a model that a program brings along.
	Model = train.Model
	// FrozenCache is where the outputs of frozen layers are kept, and how many bytes.
	FrozenCache = train.FrozenCache
	// Trainer runs a training job over the ranks of this process. Its methods are for
	// one goroutine.
	Trainer = train.Trainer
	// StepResult is what a step tells.
	StepResult = train.StepResult
	// CommUse is what a kind of collective took in a step, summed over ranks.
	CommUse = train.CommUse
	// EvalResult is the outcome of an evaluation.
	EvalResult = train.EvalResult
	// Sampling says how the next token is drawn.
	Sampling = train.Sampling
	// Job is this process's part of a run over several processes.
	Job = train.Job
	// MetricsWriter appends a run's steps to a file of JSON lines.
	MetricsWriter = train.MetricsWriter
)

// Kinds of errors, for errors.Is.
var (
	ErrConfig     = train.ErrConfig     // a Config that no run could have
	ErrDoesNotFit = train.ErrDoesNotFit // plans over a cap, and machines that are too small
	ErrNoDevice   = train.ErrNoDevice   // a device, or a library of its, is not on this machine
	ErrDiverged   = train.ErrDiverged   // a loss, gradient norm or update is not finite
	ErrDamaged    = train.ErrDamaged    // a checkpoint is there and not whole
	ErrLost       = train.ErrLost       // a process of the job is gone
)

// ErrStop, returned by what Run tells its steps, ends the run in good order: with a
// checkpoint, where one is configured, and no error.
var ErrStop = train.ErrStop

// Errors of a run.
type (
	// Diverged ends a run whose loss or gradient norm is not finite.
	Diverged = train.Diverged
	// MachineTooSmall refuses a run whose ranks together plan more memory than the
	// machine has.
	MachineTooSmall = train.MachineTooSmall
	// MissingDevice is the error of a device, or a library that it needs, that is not
	// on this machine.
	MissingDevice = train.MissingDevice
	// Refusal is the error of a plan that does not fit where something else would.
	Refusal = train.Refusal
	// NothingFits is the error of a search that found no configuration within the caps.
	NothingFits = train.NothingFits
)

// Plans with their predicted times, and searches over them.
type (
	// Forecast is the plan of a run with its predicted time.
	Forecast = train.Forecast
	// OrderCost is what Config.Reproducible takes beside the same run without it.
	OrderCost = train.OrderCost
	// Hardware is what a plan's time is predicted on.
	Hardware = train.Hardware
	// LargerDevice is a device that a plan could move to.
	LargerDevice = train.LargerDevice
	// Fitted is the outcome of a search for the fastest configuration that fits.
	Fitted = train.Fitted
	// Way is a change of a configuration that makes it fit.
	Way = train.Way
	// NoWay says what was tried where nothing makes a configuration fit.
	NoWay = train.NoWay
	// Explanation says what a plan computes again and what it keeps off the device.
	Explanation = train.Explanation
	// BufferGroup is buffers that differ by their layer alone.
	BufferGroup = train.BufferGroup
	// ClassPlace is where a class of units' buffers rests, in part.
	ClassPlace = train.ClassPlace
	// ActivationReference is a formula of the literature beside a plan's own activations.
	ActivationReference = train.ActivationReference
)

// Default returns the contract's defaults outside the demo.
func Default() Config { return train.Default() }

// NewModel is the model that c describes, for Own: also a model.MLP or model.CNN, whose
// input is "x" and whose samples have one target each.
func NewModel(name string, c model.Config) *Model { return train.NewModel(name, c) }

// New plans the run, refuses it if it does not fit, and only then allocates
// memory, starts the ranks and gives parameters their first values (or those of
// Init, or of the checkpoint to resume from).
func New(ctx context.Context, cfg Config) (*Trainer, error) { return train.New(ctx, cfg) }

// Build plans the run that cfg describes, without allocating any of it. The
// error is a *plan.DoesNotFit where a capacity is too small.
func Build(cfg Config) (*plan.Plan, error) { return train.Build(cfg) }

// Predict plans what cfg describes and predicts the time of a step on machine.
// It reads no weights and no data, and needs no device. That the plan does not
// fit is no error here.
func Predict(cfg Config, machine *cost.Machine) (*Forecast, error) {
	return train.Predict(cfg, machine)
}

// Passes plans what cfg describes and shows the model's program ("model") and the
// program after each pass, in order.
// It reads no weights and no data. That the plan does not fit is no error here.
func Passes(cfg Config, show func(pass string, p *graph.Program)) error {
	return train.Passes(cfg, show)
}

// Fit chooses what is not in given (names of flags: zero, prefetch, recompute,
// offload) so that cfg is fastest by prediction on hw and fits. With globalBatch, the
// rows of a step over all ranks, it chooses batch and accum too, where not given. It
// is deterministic. Where nothing fits, the error is a *NothingFits.
func Fit(ctx context.Context, cfg Config, given func(flag string) bool, globalBatch int, hw Hardware) (*Fitted, error) {
	return train.Fit(ctx, cfg, given, globalBatch, hw)
}

// FitHere is Fit for a run on this machine, or of a job on its hosts: also within what
// the host with the least memory has for each of its ranks.
func FitHere(ctx context.Context, cfg Config, given func(flag string) bool, globalBatch int, hw Hardware) (*Fitted, error) {
	return train.FitHere(ctx, cfg, given, globalBatch, hw)
}

// WaysOut looks for changes that make a configuration fit which does not. Each was
// planned, and fits; those that keep the job come first, then the fastest. Where there
// are none, the second result says what came nearest.
func WaysOut(ctx context.Context, asked *Forecast, hw Hardware) ([]Way, *NoWay) {
	return train.WaysOut(ctx, asked, hw)
}

// Work lends this process's ranks to the run that the job's first process leads.
func Work(j *Job, warn func(string)) (began bool, err error) { return train.Work(j, warn) }

// OpenMetrics creates the file and its folder. It starts empty, or, for a run that
// goes on after step, with the lines of the steps up to that. step −1: a new run.
func OpenMetrics(path string, step int) (*MetricsWriter, error) { return train.OpenMetrics(path, step) }

// ParseFrozenCache reads "none", "host:SIZE" or "disk:SIZE"; size reads SIZE.
func ParseFrozenCache(s string, size func(string) (int64, error)) (FrozenCache, error) {
	return train.ParseFrozenCache(s, size)
}

// CPUHardware is the CPU device of this process with so many threads, before it is
// calibrated.
func CPUHardware(threads int) Hardware { return train.CPUHardware(threads) }

// DeviceHardware is what the time of a step is predicted on for the device that cfg
// names, on this machine. It puts into cfg what only the device knows: its cap, and
// what is outside the arenas.
func DeviceHardware(cfg *Config) (Hardware, error) { return train.DeviceHardware(cfg) }

// ContextFor is the Seq of a run that continues a prompt by n tokens.
func ContextFor(cfg Config, prompt string, n int) (int, error) {
	return train.ContextFor(cfg, prompt, n)
}

// ModelFiles are the names of all files that a checkpoint may hold for Hugging Face's
// loaders, beside the weights.
func ModelFiles() []string { return train.ModelFiles() }

// Positions is the longest sequence of a model.
func Positions(model string) (int, error) { return train.Positions(model) }

// OtherBits says that two configurations of one job differ in the last bits of their
// results; "" where they do not.
func OtherBits(asked, chosen *Config) string { return train.OtherBits(asked, chosen) }

// Reasons say what bounds a plan and what it computes again and moves, a line each.
func Reasons(f *Forecast) []string { return train.Reasons(f) }

// Explain reads a forecast's program.
func Explain(f *Forecast) Explanation { return train.Explain(f) }

// Shell joins words as a shell takes them.
func Shell(args []string) string { return train.Shell(args) }

// Shortfall says what a plan that does not fit needs of every capped space.
func Shortfall(f *Forecast) string { return train.Shortfall(f) }
