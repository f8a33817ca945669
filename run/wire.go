package run

import (
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/crash"
)

// Between the process that leads a job (of rank 0) and each other one runs a stream
// of messages: the leader asks, the other answers. All decisions are the leader's;
// the other process runs sections of its program on its ranks and moves bytes.

// verb is what a request asks for.
type verb uint8

const (
	verbRun   verb = iota + 1
	verbGated      // verbRun, and asks before the update
	verbFind       // the first value that is not finite
	verbGo         // goes on with a phase, after the host's inputs are filled
	verbScalar
	verbWrite
	verbRead
	verbHost // reads a buffer in host memory, between phases too
	verbAbort
	verbRunning
	verbTrace // events of the rank's trace from Off on; N: when the leader's clock began
	verbClose
	verbSave        // the rank's part of a checkpoint, into the folder Name
	verbStage       // copies it
	verbWriteStaged // and writes that, beside what else is asked
	verbLoad        // for all ranks of the process
	verbJoin        // to open the folder of checkpoints
	verbHash        // the rank's part of the hash of all states
)

// request is a message of the leader.
type request struct {
	ID   uint64
	Slot int // of the rank among those of the process
	Verb verb
	Name string // of the section
	Step int64
	// Repeats is exec's: see Executor.SetStep.
	Repeats int
	Buf     graph.BufID
	Off     int64
	N       int64
	Pass    bool // of verbGo, at the gate
	Stop    bool // of verbGo, before a phase: exec.ErrAbandoned
	Data    []byte
	Host    []hostData // of verbGo
	Err     *wireError
}

// hostData is the contents of a buffer in host memory.
type hostData struct {
	Buf  graph.BufID
	Data []byte
}

// reply answers the request of its ID.
type reply struct {
	ID      uint64
	Phase   string // not "": a section is about to run this phase, and waits for verbGo
	Repeat  int
	Gate    bool // a section is at its gate, and waits for verbGo
	Norm    bool // and knows its gradient norm
	Passed  bool
	Stopped bool // the section was abandoned
	Found   *found
	Scalar  float64
	Data    []byte
	Next    int64 // of verbTrace: where the next events begin
	List    []string
	File    *checkpoint.File
	Err     *wireError
	State   *state // of a finished request
}

// found is an exec.NonFinite whose operation is named by its place: an operation itself
// does not travel.
type found struct {
	Rank          int
	Phase         string
	Repeat, At    int
	Buffer        string
	Loss          bool
	Input         string
	Elem          int64
	Value         float64
	InPhase, OfOp int // the operation's phase and place in it; -1: none
}

func newFound(f *exec.NonFinite) *found {
	return &found{Rank: f.Rank, Phase: f.Phase, Repeat: f.Repeat, At: f.At, Buffer: f.Buffer, Loss: f.Loss, Input: f.Input, Elem: f.Elem, Value: f.Value, InPhase: -1}
}

// nonFinite is the other way, without the operation.
func (f *found) nonFinite() exec.NonFinite {
	return exec.NonFinite{Rank: f.Rank, Phase: f.Phase, Repeat: f.Repeat, At: f.At, Buffer: f.Buffer, Loss: f.Loss, Input: f.Input, Elem: f.Elem, Value: f.Value}
}

// state is what the leader keeps of a rank elsewhere.
type state struct {
	Touched [graph.NumSpaces]int64
	Classes exec.Classes
	Comm    comm.Stats
	Disk    device.Traffic
	Usage   exec.Usage
}

// failure is the kind of an error that crosses processes.
type failure uint8

const (
	failInput failure = iota // bad input
	failFit                  // does not fit
	failRun                  // a fault at run time
	failAborted
	failTimeout
	failMismatch
	failLost
	failDamaged
)

var failures = map[failure]error{failAborted: comm.ErrAborted, failTimeout: comm.ErrTimeout, failMismatch: comm.ErrMismatch, failLost: comm.ErrLost, failDamaged: checkpoint.ErrDamaged}

// wireError is an error on its way.
type wireError struct {
	Kind failure
	Text string
	Odd  *checkpoint.NonFinite // what a rank did not save
}

// RemoteError is an error of a rank in another process.
type RemoteError struct {
	Rank int
	wire wireError
}

func (e *RemoteError) Error() string { return e.wire.Text }

// Unwrap returns the kind of a communication error, or what else this process looks
// for in errors; else nil.
func (e *RemoteError) Unwrap() error {
	if e.wire.Odd != nil {
		return e.wire.Odd
	}
	return failures[e.wire.Kind]
}

// DoesNotFit tells whether it is the refusal of a plan that does not fit there.
func (e *RemoteError) DoesNotFit() bool { return e.wire.Kind == failFit }

// Fault tells whether it went wrong while running, as opposed to bad input.
func (e *RemoteError) Fault() bool { return e.wire.Kind >= failRun }

func toWire(err error, other failure) *wireError {
	if err == nil {
		return nil
	}
	for _, kind := range []failure{failTimeout, failMismatch, failLost, failAborted, failDamaged} {
		if errors.Is(err, failures[kind]) {
			other = kind
			break
		}
	}
	w := &wireError{Kind: other, Text: err.Error()}
	errors.As(err, &w.Odd)
	return w
}

// Link is the leader's stream to another rank's process, or that process's to the
// leader.
type Link struct {
	Rank int // the first of the other end's process
	conn io.ReadWriteCloser
	dec  *gob.Decoder

	mu  sync.Mutex // of what is sent
	enc *gob.Encoder

	broken sync.Once
	why    atomic.Pointer[error]

	// See Meet.
	timeout time.Duration
	where   func() string
	said    bool // with mu: this end has said more than that it is there
	heard   atomic.Uint64
	place   atomic.Pointer[string] // of the other end's process, as it says
}

// NewLink speaks over conn with the process of a rank.
func NewLink(rank int, conn io.ReadWriteCloser) *Link {
	return &Link{Rank: rank, conn: conn, enc: gob.NewEncoder(conn), dec: gob.NewDecoder(conn)}
}

// meetEvery is how often a process says that it is there. Tests shorten it.
var meetEvery = 250 * time.Millisecond

// Meet bounds how long this end waits until both processes know what they run: for timeout
// without a word of the other. Until then this end says again and again that it is there, as
// the other has to. where names the other's host and process before it has said so; nil:
// nobody knows.
func (l *Link) Meet(timeout time.Duration, where func() string) {
	l.timeout, l.where = timeout, where
	host, _ := os.Hostname()
	here := fmt.Sprintf("host %s, process %d", host, os.Getpid())
	var v any = Task{Here: here}
	if l.Rank == 0 {
		v = Hello{Here: here}
	}
	go func() {
		defer crash.Guard()
		for l.beat(v) {
			time.Sleep(meetEvery)
		}
	}()
}

// beat says that this process is there; false once there is more to say.
func (l *Link) beat(v any) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.said && l.enc.Encode(v) == nil
}

// speak ends the beats: what comes next is what the other end waits for.
func (l *Link) speak() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.said = true
}

// seen takes a beat of the other end, which says where it is.
func (l *Link) seen(here string) {
	l.heard.Add(1)
	l.place.Store(&here)
}

// patient breaks the stream where nothing is heard of the other end for the timeout, unless
// its result is called before.
func (l *Link) patient() (heard func()) {
	if l.timeout <= 0 {
		return func() {}
	}
	done := make(chan struct{})
	go func() {
		defer crash.Guard()
		last := l.heard.Load()
		for wait := comm.NewWait(l.timeout); wait.Counted < l.timeout; wait.Look() {
			select {
			case <-done:
				return
			case <-time.After(wait.Every):
			}
			if now := l.heard.Load(); now != last {
				last, wait = now, comm.NewWait(l.timeout)
			}
		}
		l.Break(fmt.Errorf("%w: %s has not joined the job within %v", comm.ErrTimeout, l.name(), l.timeout))
	}()
	return sync.OnceFunc(func() { close(done) })
}

// name is the rank of the other end, and where its process is.
func (l *Link) name() string {
	where := ""
	if here := l.place.Load(); here != nil {
		where = *here
	} else if l.where != nil {
		where = l.where()
	}
	if where == "" {
		return fmt.Sprintf("rank %d", l.Rank)
	}
	return fmt.Sprintf("rank %d (%s)", l.Rank, where)
}

func (l *Link) send(v any) error {
	l.mu.Lock()
	err := l.enc.Encode(v)
	l.mu.Unlock()
	if err == nil {
		return nil
	}
	l.linger()
	if why := l.why.Load(); why != nil {
		return *why
	}
	return fmt.Errorf("%w: the process of rank %d takes no more messages: %v", comm.ErrLost, l.Rank, err)
}

func (l *Link) receive(v any) error {
	if err := l.dec.Decode(v); err != nil {
		if why := l.why.Load(); why != nil {
			return *why
		}
		return fmt.Errorf("%w: the process of rank %d has ended: %v", comm.ErrLost, l.Rank, err)
	}
	return nil
}

// Close ends the stream.
func (l *Link) Close() (err error) {
	l.broken.Do(func() { err = l.conn.Close() })
	return err
}

// linger waits until the end of the stream may be taken as the end of the process:
// the watchdog of the collectives sees that too, and knows more of it. A stream that
// was broken has been told.
func (l *Link) linger() {
	if l.why.Load() == nil {
		time.Sleep(endGrace)
	}
}

const endGrace = 300 * time.Millisecond

// Break ends the stream because the job has ended with err: who waits for a
// message gets it.
func (l *Link) Break(err error) {
	l.why.CompareAndSwap(nil, &err)
	_ = l.Close()
}

// Hello is what a process says of itself first, as if it ran one rank: see In.
type Hello struct {
	Rank  int
	Host  string
	Build string // of the program
	// Rounding is how the CPU's sums of bf16 products round.
	Rounding string
	// Terms is what all processes must have alike, by name: what one of them does not know is
	// not compared. Refused says what is wrong with what this process was asked to run; "":
	// nothing.
	Terms   map[string]string
	Refused string
	Caps    [graph.NumSpaces]int64 // bytes of memory that a rank of the process may use; 0: no cap
	// LocalRanks is how many ranks its host has, LocalRank its place among them; 0 of 0
	// where nobody says.
	LocalRanks, LocalRank int
	Here                  string // not "": nothing more yet, but where the process is
	Memory                int64  // bytes that all of the job may use on its host; 0: not known
	Disk                  int64  // bytes free in the folder that Task.Disk asks for; 0: not known
}

// In is h of a process that runs so many ranks, of which it names the first.
func (h Hello) In(ranks int) Hello {
	h.Rank, h.LocalRanks, h.LocalRank = h.Rank*ranks, h.LocalRanks*ranks, h.LocalRank*ranks
	return h
}

// Aligned tells whether the ranks of its host are neighbours that begin at a multiple
// of their number.
func (h Hello) Aligned() bool { return h.LocalRanks > 0 && h.Rank%h.LocalRanks == h.LocalRank }

// Differs says what keeps two processes from running one job; "" for nothing.
func (h Hello) Differs(o Hello) string {
	switch {
	case h.Build != o.Build:
		return fmt.Sprintf("rank %d (host %s) runs build %s of the program, rank %d (host %s) build %s", h.Rank, h.Host, h.Build, o.Rank, o.Host, o.Build)
	}
	var names []string
	for name, v := range h.Terms {
		if other, known := o.Terms[name]; known && v != other {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	first := slices.Min(names)
	return fmt.Sprintf("rank %d (host %s) has %s %s, rank %d (host %s) %s", o.Rank, o.Host, first, shown(o.Terms[first]), h.Rank, h.Host, shown(h.Terms[first]))
}

// shown is a value of a term as errors quote it.
func shown(v string) string {
	if v == "" {
		return "none"
	}
	return fmt.Sprintf("%.80s", strings.Trim(strconv.Quote(v), `"`))
}

// Task is the leader's answer to a Hello: what to run, or an end.
type Task struct {
	Config  []byte // nil: there is nothing to do
	Program string // hash of the program and its layout
	Err     string // why there is nothing to do
	Differs bool   // the processes are not alike: each ends with that error
	Disk    string // not "": no task yet, but what is free in this folder?
	Here    string // not "": no task yet, but where the leader is
}

// opened is the answer to a Task.
type opened struct{ Err *wireError }
