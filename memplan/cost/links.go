package cost

import (
	"maps"
	"math"
)

// Links has measured rates of collectives between the ranks of a job: for each class the
// transport's α and β, with all its work for a collective included.
type Links struct {
	Transport string         `json:"transport"`
	Ranks     int            `json:"ranks"`
	Rates     map[Class]Rate `json:"rates"` // by the bytes that a rank sends (SizeOf)
	// Fastest lists the fastest algorithms, if several were measured.
	Fastest []Fastest `json:"fastest,omitempty"`
}

// Fastest is the fastest algorithm for a collective on a buffer of some size.
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

// On returns m with the measured rates of collectives. Each rank moves its bytes itself: a
// collective keeps one core of every rank busy while it runs.
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

// NearestLinks returns the links of a transport whose number of ranks is closest, by ratio, to
// the given one; nil if there are none.
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
