// Package here describes the machine that the command runs on to package planning.
package here

import (
	"cmp"
	"context"
	"errors"
	"io"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/calibration"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/host"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/planning"
	"github.com/spillway-ml/spillway/memplan/cost"
)

// Machine is this machine. It implements planning.Here.
type Machine struct{}

func (Machine) Kept(threads int) (*cost.Calibration, string) { return calibration.Kept(threads) }

func (Machine) Links(transport string, ranks int) ([]cost.Links, string) {
	return calibration.Links(transport, ranks)
}

func (Machine) MemoryBandwidth() float64 { return calibration.MemoryBandwidth() }

func (Machine) Calibrate(ctx context.Context, c *spillway.Config) (*cost.Calibration, string, error) {
	cal, err := measureCPU(ctx, c)
	if err != nil {
		return nil, "", err
	}
	path, err := calibration.Keep(cal)
	if err != nil {
		return cal, "as calibrated just now; " + err.Error(), nil
	}
	return cal, "as calibrated just now, kept in " + path, nil
}

func measureCPU(ctx context.Context, c *spillway.Config) (*cost.Calibration, error) {
	cal, err := calibration.Measure(ctx, calibration.Options{
		Threads: c.ComputeThreads(), Disk: c.Disk, BesideDisk: host.DiskProcs.BesideDisk})
	return cal, cli.Fault(err)
}

// Calibrate measures this machine and keeps the result for later plans and runs.
func Calibrate(ctx context.Context, c *spillway.Config) error {
	cal, err := measureCPU(ctx, c)
	if err != nil {
		return err
	}
	_, err = calibration.Keep(cal)
	return err
}

// FitTo sets c to the fastest configuration that fits.
func FitTo(ctx context.Context, c *spillway.Config, onDevice spillway.Config, fixed spillway.Fixed, rows int,
	hw spillway.Hardware, out io.Writer) error {
	progress := cli.NewProgress(out)
	defer progress.End()
	progress.Says("searching for the fastest configuration that fits …")
	best, err := spillway.FitHere(ctx, onDevice, fixed, rows, hw)
	var none *spillway.NothingFits
	switch {
	case errors.As(err, &none):
		progress.Says("nothing fits; searching for what would …")
		ways := none.WithWays(ctx, onDevice, hw)
		return cmp.Or(ctx.Err(), ways) // if cancelled, the list of ways is incomplete
	case err != nil:
		return err
	}
	progress.End()
	planning.Take(out, c, best)
	return nil
}
