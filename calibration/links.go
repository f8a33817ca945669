package calibration

import (
	"fmt"
	"slices"
	"time"

	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/planner"
)

// keptLinks is what was measured of a transport on a machine.
type keptLinks struct {
	cost.Links
	Measured time.Time `json:"measured"`
}

// KeepLinks stores what collectives took over a transport, in place of what was kept
// of as many ranks on it, and returns the file that has it.
func KeepLinks(l *cost.Links) (path string, err error) {
	return keep(func(k *keptMachine) {
		k.Links = slices.DeleteFunc(k.Links, func(o keptLinks) bool { return o.Transport == l.Transport && o.Ranks == l.Ranks })
		k.Links = append(k.Links, keptLinks{*l, time.Now().UTC().Truncate(time.Second)})
	})
}

// Over is hw with collectives as they were measured over a transport (inproc, shm or
// mpi) between nearly so many ranks, and a few words on it for a person: "" where nothing
// is kept, or only what is old, and hw is as it was.
func Over(hw planner.Hardware, transport string, ranks int) (_ planner.Hardware, note string) {
	var fresh []cost.Links
	var when []time.Time
	for _, l := range keptLinksHere() {
		if time.Since(l.Measured) <= calibrationAge {
			fresh, when = append(fresh, l.Links), append(when, l.Measured)
		}
	}
	l := cost.NearestLinks(fresh, transport, ranks)
	if l == nil {
		return hw, ""
	}
	machine := hw.Machine
	hw.Machine = func(ranks int) *cost.Machine { return cost.NearestLinks(fresh, transport, ranks).On(machine(ranks)) }
	return hw, fmt.Sprintf("collectives as measured over %s between %d ranks, %s", transport, l.Ranks, when[slices.IndexFunc(fresh, func(o cost.Links) bool { return o.Transport == transport && o.Ranks == l.Ranks })].Format(time.DateOnly))
}

// Fastest are the algorithms of collectives that were measured to be the fastest over a
// transport between so many ranks; none where that was not measured, or is old.
func Fastest(transport string, ranks int) []cost.Fastest {
	for _, l := range keptLinksHere() {
		if l.Transport == transport && l.Ranks == ranks && time.Since(l.Measured) <= calibrationAge {
			return l.Links.Fastest
		}
	}
	return nil
}

func keptLinksHere() []keptLinks {
	path, err := Path()
	if err != nil {
		return nil
	}
	f, err := readCalibrations(path)
	if err != nil {
		return nil
	}
	return f.Machines[machineName()].Links
}
