package train

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/memplan/cost"
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
// mpi) between nearly so many ranks, where that is kept and not old, and a few words on
// it for a person: "" where none are needed.
func (hw Hardware) Over(transport string, ranks int) (_ Hardware, note string) {
	var fresh []cost.Links
	var when []time.Time
	for _, l := range keptLinksHere() {
		if time.Since(l.Measured) <= calibrationAge {
			fresh, when = append(fresh, l.Links), append(when, l.Measured)
		}
	}
	l := cost.NearestLinks(fresh, transport, ranks)
	if l == nil {
		if transport != "inproc" && ranks > 1 {
			note = "collectives as in one process, until " + measuresLinks[transport] + " has measured them"
		}
		return hw, note
	}
	machine := hw.Machine
	hw.Machine = func(ranks int) *cost.Machine { return cost.NearestLinks(fresh, transport, ranks).On(machine(ranks)) }
	return hw, fmt.Sprintf("collectives as measured over %s between %d ranks, %s", transport, l.Ranks, when[slices.IndexFunc(fresh, func(o cost.Links) bool { return o.Transport == transport && o.Ranks == l.Ranks })].Format(time.DateOnly))
}

var measuresLinks = map[string]string{"shm": "spillway launch -n N -- bench comm", "mpi": "mpirun -np N spillway bench comm"}

func keptLinksHere() []keptLinks {
	path, err := CalibrationPath()
	if err != nil {
		return nil
	}
	f, err := readCalibrations(path)
	if err != nil {
		return nil
	}
	return f.Machines[machineName()].Links
}

// CheckLinks refuses a transport whose collectives are not measured.
func CheckLinks(transport string) error {
	if t := strings.ToLower(transport); t != "inproc" && measuresLinks[t] == "" {
		return fmt.Errorf("--transport %.80q: want inproc, shm or mpi", transport)
	}
	return nil
}
