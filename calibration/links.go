package calibration

import (
	"fmt"
	"slices"
	"time"

	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/planner"
)

// keptLinks is a stored measurement of a transport on a machine.
type keptLinks struct {
	cost.Links
	Measured time.Time `json:"measured"`
}

// KeepLinks stores the measured times of collectives over a transport, and replaces older ones for
// the same number of ranks. It returns the path of the file.
func KeepLinks(l *cost.Links) (path string, err error) {
	return keep(func(k *keptMachine) {
		k.Links = slices.DeleteFunc(k.Links, func(o keptLinks) bool { return o.Transport == l.Transport && o.Ranks == l.Ranks })
		k.Links = append(k.Links, keptLinks{*l, time.Now().UTC().Truncate(time.Second)})
	})
}

// Over returns hw with the collective times measured over a transport (inproc, shm or mpi) for
// the nearest number of ranks, and a note for the user. If no recent measurement is stored it
// returns hw unchanged and "".
func Over(hw planner.Hardware, transport string, ranks int) (_ planner.Hardware, note string) {
	links, note := Links(transport, ranks)
	return planner.Over(hw, links, transport), note
}

// Links returns the recent measurements of collectives over a transport, and a note about those for
// the nearest number of ranks; "" if there are none.
func Links(transport string, ranks int) (fresh []cost.Links, note string) {
	var when []time.Time
	for _, l := range kept().Links {
		if l.Transport == transport && time.Since(l.Measured) <= calibrationAge {
			fresh, when = append(fresh, l.Links), append(when, l.Measured)
		}
	}
	l := cost.NearestLinks(fresh, transport, ranks)
	if l == nil {
		return nil, ""
	}
	at := slices.IndexFunc(fresh, func(o cost.Links) bool { return o.Ranks == l.Ranks })
	return fresh, fmt.Sprintf("collectives as measured over %s between %d ranks, %s", transport, l.Ranks, when[at].Format(time.DateOnly))
}

// Fastest returns the fastest measured algorithms of collectives over a transport for the given
// number of ranks; none if no recent measurement is stored.
func Fastest(transport string, ranks int) []cost.Fastest {
	for _, l := range kept().Links {
		if l.Transport == transport && l.Ranks == ranks && time.Since(l.Measured) <= calibrationAge {
			return l.Links.Fastest
		}
	}
	return nil
}
