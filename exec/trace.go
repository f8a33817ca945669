package exec

import (
	"bufio"
	"bytes"
	"cmp"
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
	Peak   float64 // FLOP/s of the ranks' device, which operations are shares of; 0: not known
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
	Bytes   int64      `json:"bytes"`           // of the operands
	Flops   int64      `json:"flops,omitempty"` // as graph.Cost counts them
	Share   float64    `json:"peak_share,omitempty"`
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

// Events are the events of ranks elsewhere: from the given place on, some of them, as
// JSON objects separated by commas; none at the end.
type Events func(from int64) (events []byte, next int64, err error)

// Write writes the trace, and behind its own ranks those of other processes. The
// executors that recorded it are synced or closed.
func (t *Trace) Write(w io.Writer, others ...Events) error {
	b := bufio.NewWriterSize(w, 1<<16)
	b.WriteString("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")
	between := ""
	all := func(ranks Events) error {
		for at := int64(0); ; {
			events, next, err := ranks(at)
			if err != nil || len(events) == 0 {
				return err
			}
			b.WriteString(between + "\n")
			b.Write(events)
			between, at = ",", next
		}
	}
	for _, ranks := range append([]Events{t.of(t.sorted(), 0)}, others...) {
		if err := all(ranks); err != nil {
			return err
		}
	}
	b.WriteString("\n]}\n")
	if err := b.Flush(); err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	return nil
}

// Of gives one rank's events, on the clock of a process that began so much earlier.
func (t *Trace) Of(rank int, earlier time.Duration) Events {
	return t.of(slices.DeleteFunc(t.sorted(), func(k *track) bool { return k.rank != rank }), earlier)
}

func (t *Trace) sorted() []*track {
	t.mu.Lock()
	tracks := slices.Clone(t.tracks)
	t.mu.Unlock()
	slices.SortFunc(tracks, func(a, b *track) int { return cmp.Or(a.rank-b.rank, int(a.stream)-int(b.stream)) })
	return tracks
}

// eventsAtOnce bounds the memory of what is written or sent of a trace.
const eventsAtOnce = 4096

// of numbers the tracks' events: of each its names, its spans, and whether it is full.
func (t *Trace) of(tracks []*track, shift time.Duration) Events {
	return func(from int64) (events []byte, next int64, err error) {
		var b bytes.Buffer
		put := func(e traceEvent) error {
			if b.Len() > 0 {
				b.WriteString(",\n")
			}
			j, err := json.Marshal(e)
			if err != nil {
				return fmt.Errorf("trace: %w", err)
			}
			b.Write(j)
			return nil
		}
		next = from
		begins := int64(0)
		for i, k := range tracks {
			n := 2 + min(k.ran.Load(), int64(len(k.spans)))
			for j := next - begins; j < n && next < from+eventsAtOnce; j++ {
				for _, e := range k.events(j, n, i == 0 || tracks[i-1].rank != k.rank, shift, t.Peak) {
					if err := put(e); err != nil {
						return nil, 0, err
					}
				}
				next++
			}
			begins += n
			if next < begins {
				break
			}
		}
		return b.Bytes(), next, nil
	}
}

// events are those of place i of n of the track: its names and its rank's at 0, a span
// each, and at the last place whether the track is full.
func (k *track) events(i, n int64, first bool, shift time.Duration, peak float64) (list []traceEvent) {
	track := int(k.stream)
	switch {
	case i == 0:
		list = append(list,
			traceEvent{Name: "thread_name", Phase: "M", Rank: k.rank, Track: track, Args: nameArg{k.stream.String()}},
			traceEvent{Name: "thread_sort_index", Phase: "M", Rank: k.rank, Track: track, Args: sortArg{track}})
		if first {
			list = append(list,
				traceEvent{Name: "process_name", Phase: "M", Rank: k.rank, Args: nameArg{fmt.Sprintf("rank %d", k.rank)}},
				traceEvent{Name: "process_sort_index", Phase: "M", Rank: k.rank, Args: sortArg{k.rank}})
		}
	case i < n-1:
		s := k.spans[i-1]
		start, dur := micros(s.start+shift), micros(s.end-s.start)
		e := traceEvent{Name: "executor", Phase: "X", Rank: k.rank, Track: track, Start: &start, Dur: &dur}
		if o := k.ops[i-1]; o != nil {
			e.Name, e.Cat, e.Args = o.op.Name, o.op.Pass.String(), o.traceArgs(s.end-s.start, peak)
		}
		list = append(list, e)
	default:
		if dropped := k.ran.Load() - int64(len(k.spans)); dropped > 0 {
			at := micros(k.spans[len(k.spans)-1].end + shift)
			list = append(list, traceEvent{Name: "the trace is full", Phase: "i", Rank: k.rank, Track: track, Start: &at, Args: droppedArg{dropped}})
		}
	}
	return list
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

func (o *operation) traceArgs(took time.Duration, peak float64) traceArgs {
	share := 0.0
	if peak > 0 && took > 0 {
		share = float64(o.flops) / took.Seconds() / peak
	}
	return traceArgs{
		Flops: o.flops, Share: share,
		Kind: o.op.Kind, Section: o.phase.section.graph.Name, Phase: o.phase.graph.Name, Pass: o.op.Pass.String(),
		Unit: o.unit, Bytes: o.bytes,
	}
}
