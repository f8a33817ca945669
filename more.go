package spillway

import (
	"context"

	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/train"
)

// CPUModel is the processor's name, empty where the system does not tell.
func CPUModel() string { return train.CPUModel() }

// Calibrate measures this machine's CPU device with so many threads (0: all). It takes
// a few seconds and leaves nothing behind.
func Calibrate(ctx context.Context, threads int, disk string) (*cost.Calibration, error) {
	return train.Calibrate(ctx, threads, disk)
}

// CalibrationPath is the file with what was measured of machines.
func CalibrationPath() (string, error) { return train.CalibrationPath() }

// CheckLinks refuses a transport whose collectives are not measured.
func CheckLinks(transport string) error { return train.CheckLinks(transport) }

// KeepCalibration stores a calibration of this machine in place of an older one.
func KeepCalibration(c *cost.Calibration) (path string, err error) { return train.KeepCalibration(c) }

// KeepLinks stores what collectives took over a transport.
func KeepLinks(l *cost.Links) (path string, err error) { return train.KeepLinks(l) }

// KeepMemoryBandwidth stores the bandwidth of this machine's memory in bytes/s.
func KeepMemoryBandwidth(v float64) (path string, err error) { return train.KeepMemoryBandwidth(v) }

// KeptCalibration returns what was kept of this machine with so many threads, or nil.
func KeptCalibration(threads int) (c *cost.Calibration, note string) {
	return train.KeptCalibration(threads)
}

// KeptMemoryBandwidth returns what was kept in bytes/s, 0 for nothing.
func KeptMemoryBandwidth() float64 { return train.KeptMemoryBandwidth() }

// KnownHardware is the CPU device of this process: as it was calibrated, or with
// typical rates. The note says which.
func KnownHardware(threads int) (Hardware, string) { return train.KnownHardware(threads) }

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
