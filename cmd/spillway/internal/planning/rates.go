package planning

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/planner"
)

// typicalRates describes the rates of a CPU that was not measured.
const typicalRates = "rates of a typical server core; spillway plan --calibrate measures this machine"

// KnownHardware returns this machine's CPU with a number of threads, calibrated or with typical
// rates, and a text with the source of the rates.
func KnownHardware(here Here, threads int) (hw planner.Hardware, rates string) {
	cal, rates := known(here, threads)
	return (&CPU{Threads: threads, Calibration: cal}).hardware(cluster.InProc), rates
}

// known returns the stored calibration of this machine's CPU; nil: there is none, use typical
// rates.
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

// measuresLinks maps transports to the commands that measure their collectives.
var measuresLinks = map[string]string{cluster.SHM: "spillway launch -n N -- bench comm",
	cluster.MPI: "mpirun -np N spillway bench comm"}

// checkLinks rejects a transport whose collectives are not measured.
func checkLinks(transport string) error {
	switch t := strings.ToLower(transport); {
	case t == cluster.NCCL:
		return errors.New("--transport nccl is how ranks on GPUs meet, which --gpu NAME plans; of CPU ranks it is " +
			"inproc, shm or mpi")
	case t != cluster.InProc && measuresLinks[t] == "":
		return fmt.Errorf("--transport %.80q: want inproc, shm or mpi: one process, spillway launch or mpirun, by "+
			"which the planned CPU ranks will meet", transport)
	}
	return nil
}

// measuredLinks returns bench comm's measurements of collectives over a transport, and a note if
// they are missing or for other numbers of ranks.
func measuredLinks(here Here, transport string, ranks int) (links []cost.Links, note string) {
	if here != nil {
		links, note = here.Links(transport, ranks)
	}
	if note == "" && transport != cluster.InProc && ranks > 1 {
		note = "collectives as in one process, until " + measuresLinks[transport] + " has measured them"
	}
	return links, note
}

// OfRun returns this machine as hardware for a run's ranks over a transport, and a text with the
// source of its rates.
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
