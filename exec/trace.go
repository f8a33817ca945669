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

// Trace records when operations ran on every rank and stream of a process, and writes a Chrome
// trace (JSON for Perfetto and chrome://tracing) with a process for each rank and a track for
// each stream.
//
// It allocates once for recordBlock operations, so that tracing does not disturb the measurement.
// Operations beyond its capacity are counted but not recorded.
type Trace struct {
	Peak   float64 // the device's peak in FLOP/s, to compute each operation's share of it; 0: not known
	spans  int
	mu     sync.Mutex
	tracks []*track
}

// NewTrace returns a trace that records up to perStream operations of each stream. The records of a
// stream need TraceBytes of memory.
func NewTrace(perStream int) *Trace { return &Trace{spans: max(perStream, 1)} }

// TraceBytes returns the bytes of memory that n recorded operations of a stream need.
func TraceBytes(n int) int64 { return blocks(n) * int64(unsafe.Sizeof(recordedBlock{})) }

// add returns the track of a stream. The track of a nil Trace records nothing.
func (t *Trace) add(rank int, id graph.StreamID) *track {
	if t == nil {
		return &track{rank: rank, stream: id}
	}
	k := &track{rank: rank, stream: id, most: t.spans, blocks: make([]*recordedBlock, blocks(t.spans))}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.tracks = append(t.tracks, k)
	return k
}

// recorded is a track's record of an operation.
type recorded struct {
	op         *operation // nil: not an operation of the program
	start, end time.Duration
}

// recordBlock is the number of operations for which a track allocates memory at a time.
const recordBlock = 1024

type recordedBlock [recordBlock]recorded

func blocks(n int) int64 { return (int64(n) + recordBlock - 1) / recordBlock }

// track is one stream's part of a trace. The executor records launches and the device the times
// of execution; the i-th launch and the i-th time belong together.
type track struct {
	rank     int
	stream   graph.StreamID
	most     int              // operations that it records
	blocks   []*recordedBlock // nil: nothing launched yet
	launched int
	ran      atomic.Int64
	lane     *lane // of the meter; nil: none
}

func (t *track) at(i int) *recorded { return &t.blocks[i/recordBlock][i%recordBlock] }

// launch records the operation that the executor is about to launch. A nil track ignores it.
func (t *track) launch(o *operation) {
	if t == nil {
		return
	}
	if t.launched < t.most {
		if t.launched%recordBlock == 0 {
			t.blocks[t.launched/recordBlock] = new(recordedBlock)
		}
		t.at(t.launched).op = o
	}
	t.launched++
	if t.lane != nil {
		t.lane.launch(o)
	}
}

// Ran implements device.Timer.
func (t *track) Ran(start, end time.Duration) {
	i := t.ran.Load()
	if i < int64(t.most) {
		r := t.at(int(i))
		r.start, r.end = start, end
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

// Events returns some of another rank's trace events, starting at index from, as JSON objects
// separated by commas, until the next call; no bytes at the end. next is the index after them.
type Events func(from int64) (events []byte, next int64, err error)

// TraceHead is the beginning of a trace file.
const TraceHead = `{"displayTimeUnit":"ms","traceEvents":[`

// Write writes the trace, followed by the events of ranks in other processes. The executors that
// recorded the trace must be synced or closed.
func (t *Trace) Write(w io.Writer, others ...Events) error {
	b := bufio.NewWriterSize(w, 1<<16)
	b.WriteString(TraceHead)
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

// Of returns the events of one rank, with times relative to the start of a process that started
// earlier by the given duration.
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

// eventsAtOnce is the number of events that are formatted at a time, to bound memory.
const eventsAtOnce = 256

// of numbers the tracks' events: for each track its names, its spans, and whether it is full.
func (t *Trace) of(tracks []*track, shift time.Duration) Events {
	var b bytes.Buffer // reused, as a run's process has little memory in addition to its plan
	encoder := json.NewEncoder(&b)
	put := func(e traceEvent) error {
		if b.Len() > 0 {
			b.WriteString(",\n")
		}
		if err := encoder.Encode(e); err != nil {
			return fmt.Errorf("trace: %w", err)
		}
		b.Truncate(b.Len() - 1) // its line end
		return nil
	}
	return func(from int64) (events []byte, next int64, err error) {
		b.Reset()
		next = from
		begins := int64(0)
		for i, k := range tracks {
			n := 2 + min(k.ran.Load(), int64(k.most))
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

// events returns the events at index i of the n indices of the track. Index 0 gives the names of
// the track and its rank. Each following index gives one span. The last index says whether the
// track is full.
func (k *track) events(i, n int64, first bool, shift time.Duration, peak float64) (list []traceEvent) {
	track := int(k.stream)
	switch {
	case i == 0:
		list = append(list,
			traceEvent{Name: "thread_name", Phase: "M", Rank: k.rank, Track: track, Args: map[string]string{"name": k.stream.String()}},
			traceEvent{Name: "thread_sort_index", Phase: "M", Rank: k.rank, Track: track, Args: map[string]int{"sort_index": track}})
		if first {
			list = append(list,
				traceEvent{Name: "process_name", Phase: "M", Rank: k.rank, Args: map[string]string{"name": fmt.Sprintf("rank %d", k.rank)}},
				traceEvent{Name: "process_sort_index", Phase: "M", Rank: k.rank, Args: map[string]int{"sort_index": k.rank}})
		}
	case i < n-1:
		s := k.at(int(i - 1))
		start, dur := micros(s.start+shift), micros(s.end-s.start)
		e := traceEvent{Name: "executor", Phase: "X", Rank: k.rank, Track: track, Start: &start, Dur: &dur}
		if o := s.op; o != nil {
			e.Name, e.Cat, e.Args = o.op.Name, o.op.Pass.String(), o.traceArgs(s.end-s.start, peak)
		}
		list = append(list, e)
	default:
		if dropped := k.ran.Load() - int64(k.most); dropped > 0 {
			at := micros(k.at(k.most-1).end + shift)
			list = append(list, traceEvent{Name: "the trace is full", Phase: "i", Rank: k.rank, Track: track, Start: &at, Args: map[string]int64{"operations": dropped}})
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
