package exec

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/spillway-ml/spillway/graph"
)

// Trace records when operations ran on every rank and stream of a process, and
// writes them as a Chrome trace (the JSON that Perfetto and chrome://tracing
// open): a process a rank, a track a stream, side by side.
//
// It records into buffers made beforehand, so that tracing does not disturb what
// it measures; operations beyond their length are counted, not recorded.
type Trace struct {
	spans  int
	mu     sync.Mutex
	tracks []*track
}

// NewTrace returns a trace that holds so many operations of each stream
// (TraceBytes in all).
func NewTrace(perStream int) *Trace { return &Trace{spans: max(perStream, 1)} }

// TraceBytes is what a stream of a rank takes of memory in a trace of so many
// operations a stream.
func TraceBytes(perStream int) int64 {
	return int64(max(perStream, 1)) * int64(unsafe.Sizeof(span{})+unsafe.Sizeof((*operation)(nil)))
}

// add returns the track of a stream; one of no trace holds nothing.
func (t *Trace) add(rank int, id graph.StreamID) *track {
	if t == nil {
		return &track{rank: rank, stream: id}
	}
	k := &track{rank: rank, stream: id, ops: make([]*operation, t.spans), spans: make([]span, t.spans)}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.tracks = append(t.tracks, k)
	return k
}

type span struct{ start, end time.Duration }

// track is one stream's part of a trace. The i-th launch and the i-th time
// belong together: the executor writes the one, the device the other.
type track struct {
	rank     int
	stream   graph.StreamID
	ops      []*operation // nil: not an operation of the program
	launched int
	spans    []span
	ran      atomic.Int64
	lane     *lane // of the meter; nil: none
}

// launch notes what the executor is about to launch. A nil track notes nothing.
func (t *track) launch(o *operation) {
	if t == nil {
		return
	}
	if t.launched < len(t.ops) {
		t.ops[t.launched] = o
	}
	t.launched++
	if t.lane != nil {
		t.lane.launch(o)
	}
}

// Ran is device.Timer's.
func (t *track) Ran(start, end time.Duration) {
	i := t.ran.Load()
	if i < int64(len(t.spans)) {
		t.spans[i] = span{start, end}
	}
	t.ran.Store(i + 1)
	if t.lane != nil {
		t.lane.took(start, end)
	}
}

// Chrome trace events; times are in microseconds.
type traceEvent struct {
	Name  string   `json:"name"`
	Phase string   `json:"ph"`
	Rank  int      `json:"pid"`
	Track int      `json:"tid"`
	Start *float64 `json:"ts,omitempty"`
	Dur   *float64 `json:"dur,omitempty"`
	Cat   string   `json:"cat,omitempty"`
	Args  any      `json:"args,omitempty"`
}

type traceArgs struct {
	Kind    graph.Kind `json:"kind"`
	Section string     `json:"section"`
	Phase   string     `json:"phase"`
	Pass    string     `json:"pass"`
	Unit    string     `json:"unit,omitempty"`
	Bytes   int64      `json:"bytes"` // of the operands
}

type nameArg struct {
	Name string `json:"name"`
}

type sortArg struct {
	Index int `json:"sort_index"`
}

type droppedArg struct {
	Operations int64 `json:"operations"`
}

// Write writes the trace. The executors that recorded it are synced or closed.
func (t *Trace) Write(w io.Writer) error {
	t.mu.Lock()
	tracks := slices.Clone(t.tracks)
	t.mu.Unlock()
	slices.SortFunc(tracks, func(a, b *track) int {
		if a.rank != b.rank {
			return a.rank - b.rank
		}
		return int(a.stream) - int(b.stream)
	})
	b := bufio.NewWriterSize(w, 1<<16)
	b.WriteString("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")
	first := true
	put := func(e traceEvent) error {
		if !first {
			b.WriteByte(',')
		}
		first = false
		b.WriteByte('\n')
		j, err := json.Marshal(e)
		if err != nil {
			return fmt.Errorf("trace: %w", err)
		}
		b.Write(j)
		return nil
	}
	for i, k := range tracks {
		meta := []traceEvent{
			{Name: "thread_name", Phase: "M", Rank: k.rank, Track: int(k.stream), Args: nameArg{k.stream.String()}},
			{Name: "thread_sort_index", Phase: "M", Rank: k.rank, Track: int(k.stream), Args: sortArg{int(k.stream)}},
		}
		if i == 0 || tracks[i-1].rank != k.rank {
			meta = append(meta,
				traceEvent{Name: "process_name", Phase: "M", Rank: k.rank, Args: nameArg{fmt.Sprintf("rank %d", k.rank)}},
				traceEvent{Name: "process_sort_index", Phase: "M", Rank: k.rank, Args: sortArg{k.rank}})
		}
		for _, e := range meta {
			if err := put(e); err != nil {
				return err
			}
		}
		ran := k.ran.Load()
		for j := range min(ran, int64(len(k.spans))) {
			start, dur := micros(k.spans[j].start), micros(k.spans[j].end-k.spans[j].start)
			e := traceEvent{Name: "executor", Phase: "X", Rank: k.rank, Track: int(k.stream), Start: &start, Dur: &dur}
			if o := k.ops[j]; o != nil {
				e.Name, e.Cat, e.Args = o.op.Name, o.op.Pass.String(), o.traceArgs()
			}
			if err := put(e); err != nil {
				return err
			}
		}
		if dropped := ran - int64(len(k.spans)); dropped > 0 {
			at := micros(k.spans[len(k.spans)-1].end)
			if err := put(traceEvent{Name: "the trace is full", Phase: "i", Rank: k.rank, Track: int(k.stream), Start: &at, Args: droppedArg{dropped}}); err != nil {
				return err
			}
		}
	}
	b.WriteString("\n]}\n")
	if err := b.Flush(); err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	return nil
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

func (o *operation) traceArgs() traceArgs {
	return traceArgs{
		Kind: o.op.Kind, Section: o.phase.section.graph.Name, Phase: o.phase.graph.Name, Pass: o.op.Pass.String(),
		Unit: o.unit, Bytes: o.bytes,
	}
}
