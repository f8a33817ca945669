package planning

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/planner"
)

// lookAround reads the machine's data for the plan, unless a document gives them.
func (f *Flags) lookAround(ctx context.Context, fs *pflag.FlagSet, c *config.Config, stderr io.Writer) error {
	m := &f.machine
	switch {
	case f.gpuFound != nil && f.calibrate:
		return errors.New("--calibrate measures this machine's CPU, and --gpu plans for a GPU; leave one of them out")
	case f.gpuFound != nil && fs.Changed("transport"):
		return errors.New("--transport is how CPU ranks meet; leave it out with --gpu")
	}
	if !f.read || f.diskHere {
		options.TuneDisk(c, stderr)
		if c.DiskTuning.Block > 0 {
			m.Disk = cmp.Or(m.Disk, &DiskSpeed{})
			m.Disk.Block, m.Disk.Depth = c.DiskTuning.Block, c.DiskTuning.Depth
		}
	} else if m.Disk != nil {
		c.DiskTuning.Block, c.DiskTuning.Depth = m.Disk.Block, m.Disk.Depth
	}
	if m.Model == nil {
		m.keepModel(c.Model)
	} else {
		shape, err := model.Parse(m.Model)
		if err != nil {
			return fmt.Errorf("--from: its model_config: %w", err)
		}
		f.opened = planner.ModelOf(c.Model, shape)
	}
	if f.gpuFound != nil {
		m.CPU = nil
		return nil
	}
	if m.CPU == nil {
		if f.here == nil && !fs.Changed("threads") {
			return errors.New("--gpu is missing, and a browser does not tell what it runs on; give --gpu NAME (plan " +
				"--list-gpus), or --threads N for a CPU of typical cores")
		}
		if err := checkLinks(f.transport); err != nil {
			return err
		}
		threads := c.ComputeThreads()
		cal, rates, err := f.cpuRates(ctx, c)
		if err != nil {
			return err
		}
		links, note := measuredLinks(f.here, strings.ToLower(f.transport), c.Ranks)
		if note != "" {
			rates += "; " + note
		}
		m.CPU = &CPU{threads, rates, cal, links}
	}
	c.Threads = m.CPU.Threads
	f.CPU, f.Rates = m.CPU.hardware(strings.ToLower(f.transport)), m.CPU.Rates
	return nil
}

// cpuRates returns the stored rates of this machine's CPU or, with --calibrate, measures and stores
// them.
func (f *Flags) cpuRates(ctx context.Context, c *config.Config) (cal *cost.Calibration, rates string, err error) {
	if f.calibrate {
		f.progress.Says("measuring this machine's CPU …")
		return f.here.Calibrate(ctx, c)
	}
	cal, rates = known(f.here, c.ComputeThreads())
	return cal, rates, nil
}

// onlyCalibrate runs --calibrate without a job to plan.
func (f *Flags) onlyCalibrate(ctx context.Context, c *config.Config, out io.Writer) error {
	_, rates, err := f.cpuRates(ctx, c)
	if err == nil {
		_, err = fmt.Fprintf(out, "this machine's CPU %s\n", rates)
	}
	return err
}
