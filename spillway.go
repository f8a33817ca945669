// Package spillway trains models that are larger than one device. Parameters, gradients and
// optimizer states are sharded over ranks (ZeRO stages 0 to 3, FSDP) and can be kept in host memory
// or on disk. Every byte of a run is planned before it starts. The run allocates exactly the
// planned memory, and a run that does not fit is refused before anything is allocated.
//
//	cfg := spillway.Default()
//	cfg.Model, cfg.Data = "gpt2", "corpus" // a preset or a Hugging Face folder; tokens or text
//	cfg.Ranks, cfg.Zero = 4, 3
//	cfg.DeviceMemory = 2 << 30 // a hard limit, in bytes a rank
//	t, err := spillway.New(ctx, cfg)
//	…
//	defer t.Close()
//	err = t.Run(ctx, func(r spillway.StepResult) error { fmt.Println(r.Step, r.Loss); return nil })
//
// A Config describes a run; no function changes the caller's. Four functions plan a Config without
// running it: Build returns the plan, and Predict adds the time of a step on a Hardware. Fit
// chooses the fastest settings that fit. WaysOut lists changes that make a Config fit which does
// not. Sharding, accumulation, recomputation and offload rewrite one program (package graph), which
// a Forecast's Plan holds. None of them changes a bit of the result.
//
// Config.Own takes values that a program provides: a model, as a function that writes its forward
// on a graph.Builder (NewModel makes one from a model.Config); samples with float inputs and masked
// targets (package data); an update rule (package zero); its own operations (graph.Define); a
// schedule. A Trainer's parameters are read and set by name; package tensors converts them to and
// from tensors of gorgonia.org/tensor.
//
// Errors name the fields of Config that have to change. Errors that a program can handle have a
// kind, for errors.Is: ErrConfig, ErrDoesNotFit, ErrNoDevice, ErrDiverged, ErrDamaged, ErrLost. A
// run does not change the process's settings of processors, freed memory and signals. A canceled
// context ends each call in good order.
//
// The implementation is in package train; the command is cmd/spillway.
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

// Parts of a run's configuration, and writers and checkers of its results.
type (
	// Model is a model that a program provides.
	Model = config.Model
	// FrozenCache is the size and memory tier of a cache for the outputs of frozen layers.
	FrozenCache = config.FrozenCache
	// Sampling says how the next token is drawn.
	Sampling = train.Sampling
	// Job is this process's part of a run over several processes.
	Job = job.Job
	// Verification checks a receipt: it runs steps again and compares them.
	Verification = receipts.Verification
	// MetricsWriter appends a run's steps to a file of JSON lines.
	MetricsWriter = train.MetricsWriter
)

// Kinds of errors, for errors.Is.
var (
	ErrConfig     = train.ErrConfig     // the Config is not valid for any run
	ErrDoesNotFit = train.ErrDoesNotFit // a plan is over a cap, or a machine is too small
	ErrNoDevice   = train.ErrNoDevice   // this machine lacks a device, or a library that the device needs
	ErrDiverged   = train.ErrDiverged   // a loss, gradient norm or update is not finite
	ErrDamaged    = train.ErrDamaged    // a checkpoint exists but is incomplete or corrupt
	ErrLost       = train.ErrLost       // the job lost one of its processes
	ErrDiffers    = receipt.ErrDiffers  // a run differs from its receipt
)

// ErrStop ends the run in good order when the callback of Run returns it: with a checkpoint, if one
// is configured, and no error.
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
	// Hardware describes the devices and links for which a plan's time is predicted.
	Hardware = planner.Hardware
	// Fixed are the fields of a Config that Fit leaves as they are.
	Fixed = planner.Fixed
	// Fitted is the outcome of a search for the fastest configuration that fits.
	Fitted = planner.Fitted
	// Settings are fields of a Config with their values, such as those that a search chose.
	Settings = planner.Settings
	// Way is a change of a configuration that makes it fit.
	Way = planner.Way
	// NoWay describes an unsuccessful search for changes that make a configuration fit.
	NoWay = planner.NoWay
	// Explanation lists what a plan recomputes and what it stores off the device.
	Explanation = planner.Explanation
)

// Default returns the command line's default Config.
func Default() Config { return config.Default() }

// NewModel returns the model that c describes, for Own. For a model.MLP or model.CNN the input is
// called "x" and each sample has one target.
func NewModel(name string, c model.Config) *Model { return config.NewModel(name, c) }

// New plans the run and refuses it if it does not fit. Only then does it allocate memory, start the
// ranks and set the parameters' initial values: drawn, from Init, or from the checkpoint to resume
// from.
func New(ctx context.Context, cfg Config) (*Trainer, error) { return train.New(ctx, cfg) }

// Build plans the run that cfg describes, without allocating its memory. If a capacity is too
// small, the error is a *plan.DoesNotFit.
func Build(ctx context.Context, cfg Config) (*plan.Plan, error) { return planner.Build(ctx, cfg) }

// Predict plans the run that cfg describes and predicts the time of a step on machine. It reads no
// weights and no data, and needs no device. A plan that does not fit is no error here.
func Predict(ctx context.Context, cfg Config, machine *cost.Machine) (*Forecast, error) {
	return planner.Predict(ctx, cfg, machine)
}

// Passes plans the run that cfg describes. It calls show with the model's program ("model") and
// with the program after each pass, in order; an error of show ends it. show may be nil. It reads
// no weights and no data. A plan that does not fit is no error here.
func Passes(ctx context.Context, cfg Config, show func(pass string, p *graph.Program) error) error {
	return planner.Passes(ctx, cfg, show)
}

// Fit chooses the fields that are not fixed, so that cfg fits and has the least predicted time on
// hw: stage, prefetch, recomputation and offload. rows is the number of rows of a step over all
// ranks; if it is not 0, Fit chooses Batch and Accum too. Fit is deterministic. If nothing fits,
// the error is a *NothingFits.
func Fit(ctx context.Context, cfg Config, fixed Fixed, rows int, hw Hardware) (*Fitted, error) {
	return planner.Fit(ctx, cfg, fixed, rows, hw)
}

// FitHere is Fit for a run on this machine, or for a job on its hosts. The plan must also fit into
// the memory per rank of the host that has the least.
func FitHere(ctx context.Context, cfg Config, fixed Fixed, rows int, hw Hardware) (*Fitted, error) {
	return train.FitHere(ctx, cfg, fixed, rows, hw)
}

// WaysOut looks for changes that make a configuration fit which does not. Each was planned, and
// fits. Those that keep the job come first, then the fastest. If there are none, the second result
// describes the plan that came nearest.
func WaysOut(ctx context.Context, asked *Forecast, hw Hardware) ([]Way, *NoWay) {
	return planner.WaysOut(ctx, asked, hw)
}

// Explain returns what a forecast's plan recomputes and stores off the device. For a nil forecast
// the result is empty.
func Explain(f *Forecast) Explanation { return planner.Explain(f) }

// Work runs this process's ranks for the run that the job's first process leads. A canceled context
// ends the job.
func Work(ctx context.Context, j *Job, warn func(string)) (began bool, err error) {
	return train.Work(ctx, j, warn)
}

// VerifyReceipt follows the chain of a run's receipt, and runs chosen segments again. The error is
// ErrDiffers if something differs from the record; the findings are returned with it.
func VerifyReceipt(ctx context.Context, v Verification) (*receipts.Verified, error) {
	return train.VerifyReceipt(ctx, v)
}

// OpenMetrics creates the file and its folder. For a run that resumes after step it keeps the lines
// up to that step; with step −1, a new run, the file starts empty. A file that another run writes
// to is refused, and so is one that holds no metrics.
func OpenMetrics(path string, step int) (*MetricsWriter, error) { return train.OpenMetrics(path, step) }

// CPUHardware returns typical rates of this process's CPU with the given number of threads. They
// are not calibrated.
func CPUHardware(threads int) Hardware { return planner.CPUHardware(threads) }

// DeviceHardware returns the rates from which the time of a step is predicted on the device that
// cfg names, on this machine; for the CPU they are typical rates. The returned Config also has what
// only the device knows: its memory cap, and the bytes needed outside the arenas.
func DeviceHardware(cfg Config) (Hardware, Config, error) { return train.DeviceHardware(cfg) }
