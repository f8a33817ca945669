package planning

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/planner"
)

// Here is the machine that plans, for plans of its own hardware. Where nothing can be measured, as
// in a browser, it is nil, and those are refused.
type Here interface {
	// Kept returns what is kept of the CPU with so many threads, with words for a person that
	// say when it was measured or why it is not used; "" where nothing is kept.
	Kept(threads int) (*cost.Calibration, string)
	// Calibrate measures the CPU and keeps the result. The words say where.
	Calibrate(ctx context.Context, c *config.Config) (*cost.Calibration, string, error)
	// Links returns the kept collectives over a transport, and in words those nearest to ranks.
	Links(transport string, ranks int) ([]cost.Links, string)
	// GPU finds the GPU with the least free memory.
	GPU() (*gpus.GPU, error)
	// MemoryBandwidth is the kept one in bytes/s; 0: none.
	MemoryBandwidth() float64
}

// refuseMachine refuses flags that measure, read or write where there is no machine.
func (f *Flags) refuseMachine(fs *pflag.FlagSet) error {
	if f.here != nil {
		return nil
	}
	if strings.EqualFold(f.gpu, "detect") {
		return errors.New("--gpu detect: a browser does not tell which GPU it has; give --gpu NAME (plan --list-gpus)")
	}
	if f.calibrate {
		return errors.New("--calibrate: a browser cannot measure its machine; give --gpu NAME, or --threads N for a CPU of typical cores")
	}
	for _, name := range []string{"config", "from", "html", "json", "dump"} {
		if file := fs.Lookup(name).Value.String(); file != "" && file != "-" {
			return fmt.Errorf("--%s %.80q: a browser has no files; leave it out, or use spillway plan on a computer", name, file)
		}
	}
	return nil
}

// typicalRates are those of a CPU that was not measured, for a person.
const typicalRates = "rates of a typical server core; spillway plan --calibrate measures this machine"

// KnownHardware is this machine's CPU with so many threads, as it was calibrated or
// with typical rates, and where those are from, for a person.
func KnownHardware(here Here, threads int) (hw planner.Hardware, rates string) {
	cal, rates := known(here, threads)
	return (&CPU{Threads: threads, Calibration: cal}).hardware(cluster.InProc), rates
}

// known is what was kept of this machine's CPU; nil: nothing, and typical rates are taken.
func known(here Here, threads int) (cal *cost.Calibration, rates string) {
	if here == nil {
		return nil, typicalRates
	}
	cal, note := here.Kept(threads)
	if cal != nil {
		return cal, note
	}
	rates = typicalRates
	if note != "" {
		rates += "; " + note
	}
	return nil, rates
}

// measuresLinks are the commands that measure collectives over a transport.
var measuresLinks = map[string]string{cluster.SHM: "spillway launch -n N -- bench comm", cluster.MPI: "mpirun -np N spillway bench comm"}

// checkLinks refuses a transport whose collectives are not measured.
func checkLinks(transport string) error {
	switch t := strings.ToLower(transport); {
	case t == cluster.NCCL:
		return errors.New("--transport nccl is how ranks on GPUs meet, which --gpu NAME plans; of CPU ranks it is inproc, shm or mpi")
	case t != cluster.InProc && measuresLinks[t] == "":
		return fmt.Errorf("--transport %.80q: want inproc, shm or mpi: one process, spillway launch or mpirun, by which the planned CPU ranks will meet", transport)
	}
	return nil
}

// measuredLinks are the collectives over a transport as bench comm has measured them, for so
// many ranks, and a note for a person: "" where none is needed.
func measuredLinks(here Here, transport string, ranks int) (links []cost.Links, note string) {
	if here != nil {
		links, note = here.Links(transport, ranks)
	}
	if note == "" && transport != cluster.InProc && ranks > 1 {
		note = "collectives as in one process, until " + measuresLinks[transport] + " has measured them"
	}
	return links, note
}

// OfRun is this machine for the ranks of a run that meet over a transport, and in words where
// its rates are from.
func OfRun(here Here, c *config.Config, transport string) (hw planner.Hardware, rates string, err error) {
	if err := checkLinks(transport); err != nil {
		return hw, "", err
	}
	transport = strings.ToLower(transport)
	hw, rates = KnownHardware(here, c.ComputeThreads())
	links, note := measuredLinks(here, transport, c.Ranks)
	if note != "" {
		rates += "; " + note
	}
	return planner.Over(hw, links, transport), rates, nil
}

// cpuRates are the rates of this machine's CPU: what was kept of it or, with --calibrate, what
// is measured now and kept for later plans.
func (f *Flags) cpuRates(ctx context.Context, c *config.Config) (cal *cost.Calibration, rates string, err error) {
	if f.calibrate {
		f.progress.Says("measuring this machine's CPU …")
		return f.here.Calibrate(ctx, c)
	}
	cal, rates = known(f.here, c.ComputeThreads())
	return cal, rates, nil
}
