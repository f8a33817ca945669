package exec

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/spillway-ml/spillway/graph"
)

// CollectiveKinds lists the kinds of collectives, in the order of Usage.Collectives.
var CollectiveKinds = [...]graph.Kind{graph.AllGather, graph.ReduceScatter, graph.AllReduce, graph.AllToAll}

// Usage is the cost of a rank's collectives so far; it is measured with Config.Meter.
type Usage struct {
	Collectives [len(CollectiveKinds)]Collective
	// Busy is the time in which the communication stream ran collectives, including waiting for
	// peers. Overlapped is the part of Busy in which the rank also computed, on the device or the
	// host.
	Busy, Overlapped time.Duration
}

// Collective is the cost of the collectives of one kind.
type Collective struct {
	Calls int64
	Bytes int64 // size of the complete buffers: all ranks' shards of a gather or scatter
	Time  time.Duration
}

// Sub returns the difference u − earlier.
func (u Usage) Sub(earlier Usage) Usage {
	for i := range u.Collectives {
		u.Collectives[i].add(earlier.Collectives[i], -1)
	}
	u.Busy -= earlier.Busy
	u.Overlapped -= earlier.Overlapped
	return u
}

// Add returns the sum u + o.
func (u Usage) Add(o Usage) Usage {
	for i := range u.Collectives {
		u.Collectives[i].add(o.Collectives[i], 1)
	}
	u.Busy += o.Busy
	u.Overlapped += o.Overlapped
	return u
}

func (c *Collective) add(o Collective, sign int64) {
	c.Calls += sign * o.Calls
	c.Bytes += sign * o.Bytes
	c.Time += time.Duration(sign) * o.Time
}

// lane is the meter's record of one stream: launched operations that the device has not reported
// yet, and the times of reported ones.
type lane struct {
	mu       sync.Mutex
	launched []*operation // nil: not an operation of the program
	told     int          // number of launched operations that the device has reported
	ran      []ranSpan
}

type ranSpan struct {
	start, end time.Duration
	o          *operation
}

func (l *lane) launch(o *operation) {
	l.mu.Lock()
	l.launched = append(l.launched, o)
	l.mu.Unlock()
}

func (l *lane) took(start, end time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ran = append(l.ran, ranSpan{start, end, l.launched[l.told]})
	l.told++
}

// meter accumulates the times of a rank's streams.
type meter struct {
	lanes [graph.NumStreams]*lane
	work  []ranSpan // scratch of fold
	mu    sync.Mutex
	sum   Usage
}

// metered are the streams that the meter records.
var metered = []graph.StreamID{graph.Comm, graph.Compute, graph.HostWork}

// fold adds the times recorded since the last call to the sum. The streams must be idle.
func (m *meter) fold() {
	m.work = m.work[:0]
	var talk []ranSpan
	for _, id := range metered {
		l := m.lanes[id]
		if l == nil {
			continue
		}
		l.mu.Lock()
		if id == graph.Comm {
			talk = l.ran
		} else {
			m.work = append(m.work, l.ran...)
		}
		l.launched = append(l.launched[:0], l.launched[l.told:]...)
		l.ran, l.told = l.ran[:0], 0
		l.mu.Unlock()
	}
	m.work = union(m.work)
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range talk {
		if s.o == nil {
			continue
		}
		i := slices.Index(CollectiveKinds[:], s.o.op.Kind)
		if i < 0 {
			continue
		}
		m.sum.Collectives[i].add(Collective{1, s.o.whole, s.end - s.start}, 1)
		m.sum.Busy += s.end - s.start
	}
	m.sum.Overlapped += common(talk, m.work)
}

// union merges overlapping spans, in place, and returns them in order of their start.
func union(list []ranSpan) []ranSpan {
	slices.SortFunc(list, func(a, b ranSpan) int { return cmp.Compare(a.start, b.start) })
	n := 0
	for _, s := range list {
		if n > 0 && s.start <= list[n-1].end {
			list[n-1].end = max(list[n-1].end, s.end)
			continue
		}
		list[n] = s
		n++
	}
	return list[:n]
}

// common returns the time in which spans of both lists run. The spans of each list must be in order
// and must not overlap.
func common(a, b []ranSpan) (sum time.Duration) {
	for len(a) > 0 && len(b) > 0 {
		if from, to := max(a[0].start, b[0].start), min(a[0].end, b[0].end); from < to {
			sum += to - from
		}
		if a[0].end < b[0].end {
			a = a[1:]
		} else {
			b = b[1:]
		}
	}
	return sum
}
