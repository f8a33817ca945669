package cost

import (
	"maps"
	"math"
)

// Links is what collectives took between the ranks of a job, by class: the α and β of
// the transport, of all that it does for a collective.
type Links struct {
	Transport string         `json:"transport"`
	Ranks     int            `json:"ranks"`
	Rates     map[Class]Rate `json:"rates"` // by the bytes that a rank sends, as SizeOf has them
	// Fastest are the algorithms that took least, where several were measured.
	Fastest []Fastest `json:"fastest,omitempty"`
}

// Fastest is the algorithm that took least for a collective on a buffer of some bytes.
type Fastest struct {
	Op        string `json:"op"`
	Bytes     int64  `json:"bytes"`
	Algorithm string `json:"algorithm"`
}

// FitLinks finds the rates that are closest to the samples.
func FitLinks(transport string, ranks int, samples []Sample) *Links {
	l := &Links{Transport: transport, Ranks: ranks, Rates: map[Class]Rate{}}
	for class, r := range Fit(0, Samples{Alone: samples}).Rates {
		l.Rates[class] = r.Alone
	}
	return l
}

// On is m with collectives as measured. Each rank moves its bytes by itself: a
// collective keeps a core of every rank busy while it takes.
func (l *Links) On(m *Machine) *Machine {
	with := *m
	with.Measured = maps.Clone(m.Measured)
	if with.Measured == nil {
		with.Measured = map[Class]Rates{}
	}
	for class, r := range l.Rates {
		with.Measured[class] = Rates{Alone: r, Core: r}
	}
	return &with
}

// NearestLinks are those of a transport whose ranks are nearest to so many, by their
// ratio; nil where there are none.
func NearestLinks(list []Links, transport string, ranks int) (best *Links) {
	least := math.Inf(1)
	for i := range list {
		l := &list[i]
		if l.Transport != transport || l.Ranks < 2 {
			continue
		}
		a, b := float64(l.Ranks), float64(max(ranks, 1))
		if d := max(a/b, b/a); d < least {
			best, least = l, d
		}
	}
	return best
}
