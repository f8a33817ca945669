package planning

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/calibration"
	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/memplan/cost"
)

// KnownHardware is this machine's CPU with so many threads, as it was calibrated or
// with typical rates, and where those are from, for a person.
func KnownHardware(threads int) (hw spillway.Hardware, rates string) {
	cal, rates := known(threads)
	return (&CPU{Threads: threads, Calibration: cal}).hardware(cluster.InProc), rates
}

// known is what was kept of this machine's CPU; nil: nothing, and typical rates are taken.
func known(threads int) (cal *cost.Calibration, rates string) {
	cal, note := calibration.Kept(threads)
	if cal != nil {
		return cal, note
	}
	rates = "rates of a typical server core; spillway plan --calibrate measures this machine"
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
func measuredLinks(transport string, ranks int) ([]cost.Links, string) {
	links, note := calibration.Links(transport, ranks)
	if note == "" && transport != cluster.InProc && ranks > 1 {
		note = "collectives as in one process, until " + measuresLinks[transport] + " has measured them"
	}
	return links, note
}

// FitTo makes c the fastest that fits.
func FitTo(ctx context.Context, c *spillway.Config, onDevice spillway.Config, fixed spillway.Fixed, rows int, hw spillway.Hardware, out io.Writer) error {
	progress := cli.NewProgress(out)
	defer progress.End()
	progress.Says("searching for the fastest configuration that fits …")
	best, err := spillway.FitHere(ctx, onDevice, fixed, rows, hw)
	var none *spillway.NothingFits
	switch {
	case errors.As(err, &none):
		progress.Says("nothing fits; searching for what would …")
		ways := none.WithWays(ctx, onDevice, hw)
		return cmp.Or(ctx.Err(), ways) // what was found is not all there is
	case err != nil:
		return err
	}
	progress.End()
	printFitted(out, best)
	takeFitted(c, best)
	return nil
}

// OfRun is this machine for the ranks of a run that meet over a transport, and in words where
// its rates are from.
func OfRun(c *spillway.Config, transport string) (hw spillway.Hardware, rates string, err error) {
	if err := checkLinks(transport); err != nil {
		return hw, "", err
	}
	transport = strings.ToLower(transport)
	hw, rates = KnownHardware(c.ComputeThreads())
	links, note := measuredLinks(transport, c.Ranks)
	if note != "" {
		rates += "; " + note
	}
	return calibration.With(hw, links, transport), rates, nil
}
