// Package spillway trains models that are larger than one device: parameters,
// gradients and optimizer states sharded over ranks (ZeRO stages 0 to 3, FSDP), and
// kept in host memory or on disk. Every byte of a run is planned before it starts: the
// plan is the memory that is allocated, and a run that does not fit is refused before
// anything is.
//
//	cfg := spillway.Default()
//	cfg.Model, cfg.Data = "gpt2", "corpus" // a preset or a Hugging Face folder; tokens or text
//	cfg.Ranks, cfg.Zero = 4, 3
//	cfg.DeviceMemory = 2 << 30 // a wall, in bytes a rank
//	t, err := spillway.New(ctx, cfg)
//	…
//	defer t.Close()
//	err = t.Run(ctx, func(r spillway.StepResult) error { fmt.Println(r.Step, r.Loss); return nil })
//
// A Config says what to train; nothing writes to it. Without running anything, Build
// plans it, Predict adds the time of a step on a Hardware, WaysOut lists what makes it
// fit where it does not, and Fit chooses the fastest that fits. Sharding, accumulation,
// recomputation and offload are changes of one program (package graph), which a
// Forecast's Plan holds, and none of them changes a bit of the result.
//
// Config.Own takes what a program brings along: a model as a function that writes its
// forward on a graph.Builder (NewModel makes one of a model.Config), samples with float
// inputs and masked targets (package data), an update rule (package zero), operations
// of its own (graph.Define), a schedule. A Trainer's parameters are read and set by name;
// package tensors has them as gorgonia.org/tensor's.
//
// Errors name the fields of Config that are to change. What a program can act on is of a
// kind, for errors.Is: ErrConfig, ErrDoesNotFit, ErrNoDevice, ErrDiverged, ErrDamaged,
// ErrLost. A run leaves the process alone: processors, freed memory and signals are the
// program's, and a canceled context ends each call in good order.
//
// The machine behind it is package train; the command is cmd/spillway.
package spillway

import (
	"context"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/receipt"
	"github.com/spillway-ml/spillway/train"
	"github.com/spillway-ml/spillway/train/job"
	"github.com/spillway-ml/spillway/train/receipts"
)

// What a run is told, and what it tells.
type (
	// Model is a model that a program brings along.
	Model = config.Model
	// FrozenCache is where the outputs of frozen layers are kept, and how many bytes.
	FrozenCache = config.FrozenCache
	// Sampling says how the next token is drawn.
	Sampling = train.Sampling
	// Job is this process's part of a run over several processes.
	Job = job.Job
	// Verification is a receipt that is held against the run.
	Verification = receipts.Verification
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
	ErrDiffers    = receipt.ErrDiffers  // a run is not as its receipt says
)

// ErrStop, returned by what Run tells its steps, ends the run in good order: with a
// checkpoint, where one is configured, and no error.
var ErrStop = train.ErrStop

// Errors of a run.
type (
	// FieldError refuses what a field of a Config says; it is of kind ErrConfig.
	FieldError = config.FieldError
	// Diverged ends a run whose loss or gradient norm is not finite.
	Diverged = train.Diverged
	// MachineTooSmall refuses a run whose ranks together plan more memory than the
	// machine has.
	MachineTooSmall = train.MachineTooSmall
	// MissingDevice is the error of a device, or a library that it needs, that is not
	// on this machine.
	MissingDevice = train.MissingDevice
	// Refusal is the error of a plan that does not fit where something else would.
	Refusal = planner.Refusal
	// NothingFits is the error of a search that found no configuration within the caps.
	NothingFits = planner.NothingFits
)

// Plans with their predicted times, and searches over them.
type (
	// Forecast is the plan of a run with its predicted time.
	Forecast = planner.Forecast
	// Hardware is what a plan's time is predicted on.
	Hardware = planner.Hardware
	// Fixed are the fields of a Config that Fit leaves as they are.
	Fixed = planner.Fixed
	// Fitted is the outcome of a search for the fastest configuration that fits.
	Fitted = planner.Fitted
	// Settings are fields of a Config with their values: what a search chose.
	Settings = planner.Settings
	// Way is a change of a configuration that makes it fit.
	Way = planner.Way
	// NoWay says what was tried where nothing makes a configuration fit.
	NoWay = planner.NoWay
	// Explanation says what a plan computes again and what it keeps off the device.
	Explanation = planner.Explanation
)

// Default returns the command line's defaults: what a Config starts from.
func Default() Config { return config.Default() }

// NewModel is the model that c describes, for Own: also a model.MLP or model.CNN, whose
// input is "x" and whose samples have one target each.
func NewModel(name string, c model.Config) *Model { return config.NewModel(name, c) }

// New plans the run, refuses it if it does not fit, and only then allocates
// memory, starts the ranks and gives parameters their first values (or those of
// Init, or of the checkpoint to resume from).
func New(ctx context.Context, cfg Config) (*Trainer, error) { return train.New(ctx, cfg) }

// Build plans the run that cfg describes, without allocating any of it. The
// error is a *plan.DoesNotFit where a capacity is too small.
func Build(ctx context.Context, cfg Config) (*plan.Plan, error) { return planner.Build(ctx, cfg) }

// Predict plans what cfg describes and predicts the time of a step on machine.
// It reads no weights and no data, and needs no device. That the plan does not
// fit is no error here.
func Predict(ctx context.Context, cfg Config, machine *cost.Machine) (*Forecast, error) {
	return planner.Predict(ctx, cfg, machine)
}

// Passes plans what cfg describes and shows the model's program ("model") and the
// program after each pass, in order; an error of show ends it. A nil show sees nothing.
// It reads no weights and no data. That the plan does not fit is no error here.
func Passes(ctx context.Context, cfg Config, show func(pass string, p *graph.Program) error) error {
	return planner.Passes(ctx, cfg, show)
}

// Fit chooses what is not fixed so that cfg is fastest by prediction on hw and fits:
// stage, prefetch, what is computed again and what rests off the device. With rows, the
// rows of a step over all ranks, it chooses Batch and Accum too. It is deterministic.
// Where nothing fits, the error is a *NothingFits.
func Fit(ctx context.Context, cfg Config, fixed Fixed, rows int, hw Hardware) (*Fitted, error) {
	return planner.Fit(ctx, cfg, fixed, rows, hw)
}

// FitHere is Fit for a run on this machine, or of a job on its hosts: also within what
// the host with the least memory has for each of its ranks.
func FitHere(ctx context.Context, cfg Config, fixed Fixed, rows int, hw Hardware) (*Fitted, error) {
	return train.FitHere(ctx, cfg, fixed, rows, hw)
}

// WaysOut looks for changes that make a configuration fit which does not. Each was
// planned, and fits; those that keep the job come first, then the fastest. Where there
// are none, the second result says what came nearest.
func WaysOut(ctx context.Context, asked *Forecast, hw Hardware) ([]Way, *NoWay) {
	return planner.WaysOut(ctx, asked, hw)
}

// Explain says what a forecast's plan computes again and keeps off the device; nothing of a nil one.
func Explain(f *Forecast) Explanation { return planner.Explain(f) }

// Work lends this process's ranks to the run that the job's first process leads. A
// canceled context ends the job.
func Work(ctx context.Context, j *Job, warn func(string)) (began bool, err error) {
	return train.Work(ctx, j, warn)
}

// VerifyReceipt follows the chain of a run's receipt, and runs chosen segments again. The
// error is ErrDiffers where something is not as recorded; what was found comes with it.
func VerifyReceipt(ctx context.Context, v Verification) (*receipts.Verified, error) {
	return train.VerifyReceipt(ctx, v)
}

// OpenMetrics creates the file and its folder. It starts empty, or, for a run that
// goes on after step, with the lines of the steps up to that. step −1: a new run. It refuses
// a file that holds no metrics, and one that another run writes to.
func OpenMetrics(path string, step int) (*MetricsWriter, error) { return train.OpenMetrics(path, step) }

// CPUHardware is the CPU device of this process with so many threads, before it is
// calibrated.
func CPUHardware(threads int) Hardware { return planner.CPUHardware(threads) }

// DeviceHardware is what the time of a step is predicted on for the device that cfg
// names, on this machine; the Config that comes back has what only the device knows: its
// cap, and what is outside the arenas.
func DeviceHardware(cfg Config) (Hardware, Config, error) { return train.DeviceHardware(cfg) }
