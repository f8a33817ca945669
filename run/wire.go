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

// A stream of messages connects the leader of a job (the process of rank 0) with each other
// process. The leader sends requests and makes all decisions. The other process answers: it runs
// sections of its program on its ranks and moves bytes.

// verb is the kind of a request.
type verb uint8

const (
	verbRun   verb = iota + 1
	verbGated      // verbRun that asks the leader before the update
	verbFind       // exec.FindNonFinite
	verbGo         // continue with a phase, after the host's inputs are set
	verbScalar
	verbWrite
	verbRead
	verbHost // read a buffer in host memory, also between phases
	verbAbort
	verbRunning
	verbTrace // events of the rank's trace from index Off; N: start of the leader's clock
	verbClose
	verbSave        // write the rank's part of a checkpoint into the folder Name
	verbStage       // copy the rank's part of a checkpoint to memory
	verbWriteStaged // write the copy, concurrently with other requests
	verbLoad        // load a checkpoint into all local ranks of the process
	verbJoin        // open the leader's checkpoint folder
	verbHash        // hash the rank's share of all states
)

// request is a message from the leader.
type request struct {
	ID   uint64
	Slot int // index of the rank among those of the process
	Verb verb
	Name string // of the section, or of a checkpoint
	Step int64
	// Repeats is exec's: see Executor.SetStep.
	Repeats int
	Buf     graph.BufID
	Off     int64
	N       int64
	Pass    bool // verbGo at the gate: run the update
	Stop    bool // verbGo before a phase: before returned exec.ErrAbandoned
	Data    []byte
	Host    []hostData // verbGo: changed host buffers
	Err     *wireError
}

// hostData is the contents of a buffer in host memory.
type hostData struct {
	Buf  graph.BufID
	Data []byte
}

// reply answers the request with the same ID.
type reply struct {
	ID      uint64
	Phase   string // if not "": a section is about to run this phase, and waits for verbGo
	Repeat  int
	Gate    bool // a section is at its gate, and waits for verbGo
	Norm    bool // at the gate: the gradient norm is known
	Passed  bool
	Stopped bool // the section was abandoned
	Found   *found
	Scalar  float64
	Data    []byte
	Next    int64 // verbTrace: index of the next events
	List    []string
	File    *checkpoint.File
	Err     *wireError
	State   *state // set in the last reply to a request
	// Interrupted answers no request: the process was asked to end. See Link.Interrupt.
	Interrupted bool
}

// found is an exec.NonFinite in which the operation is given by its indices, because an operation
// itself is not sent.
type found struct {
	Rank          int
	Phase         string
	Repeat, At    int
	Buffer        string
	Loss          bool
	Input         string
	Elem          int64
	Value         float64
	InPhase, OfOp int // indices of the operation's phase and of the operation in it; -1: none
}

func newFound(f *exec.NonFinite) *found {
	return &found{Rank: f.Rank, Phase: f.Phase, Repeat: f.Repeat, At: f.At, Buffer: f.Buffer, Loss: f.Loss, Input: f.Input, Elem: f.Elem, Value: f.Value, InPhase: -1}
}

// nonFinite converts back, without the operation.
func (f *found) nonFinite() exec.NonFinite {
	return exec.NonFinite{Rank: f.Rank, Phase: f.Phase, Repeat: f.Repeat, At: f.At, Buffer: f.Buffer, Loss: f.Loss, Input: f.Input, Elem: f.Elem, Value: f.Value}
}

// state is the leader's cache of values of a rank in another process.
type state struct {
	Touched [graph.NumSpaces]int64
	Classes exec.Classes
	Comm    comm.Stats
	Disk    device.Traffic
	Usage   exec.Usage
}

// failure is the kind of an error that is sent between processes.
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

// wireError is an error in the form in which it is sent.
type wireError struct {
	Kind failure
	Text string
	Odd  *checkpoint.NonFinite // the values that a rank refused to save
}

// RemoteError is an error of a rank in another process.
type RemoteError struct {
	Rank int
	wire wireError
}

func (e *RemoteError) Error() string { return e.wire.Text }

// Unwrap returns the error that callers in this process test for, such as a kind of communication
// error; nil if there is none.
func (e *RemoteError) Unwrap() error {
	if e.wire.Odd != nil {
		return e.wire.Odd
	}
	return failures[e.wire.Kind]
}

// DoesNotFit says whether the error is that the plan does not fit in the other process's memory.
func (e *RemoteError) DoesNotFit() bool { return e.wire.Kind == failFit }

// Fault says whether the error occurred at run time, as opposed to bad input.
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

// Link is one end of the stream between the leader and another process.
type Link struct {
	Rank int // first rank of the process at the other end
	conn io.ReadWriteCloser
	dec  *gob.Decoder

	mu  sync.Mutex // guards sending
	enc *gob.Encoder

	// Interrupted is called at the leader's end each time that the other process is interrupted.
	// It must not block. nil: an interrupt of that process has no effect.
	Interrupted          func()
	interrupted, serving bool // at the other end, guarded by mu

	broken sync.Once
	why    atomic.Pointer[error]

	// For Meet.
	timeout time.Duration
	where   func() string
	said    bool // guarded by mu: this end has sent messages other than beats
	heard   atomic.Uint64
	place   atomic.Pointer[string] // host and process of the other end, as that end sent them
}

// NewLink returns a Link over conn to the process of a rank.
func NewLink(rank int, conn io.ReadWriteCloser) *Link {
	return &Link{Rank: rank, conn: conn, enc: gob.NewEncoder(conn), dec: gob.NewDecoder(conn)}
}

// meetEvery is the interval of beats, by which a process says that it is running. Tests shorten it.
var meetEvery = 250 * time.Millisecond

// Meet limits the wait for the other end until both know their task: at most timeout without a
// beat. Until then this end sends beats, and the other end must too. where names the other end's
// host and process until that end has sent them itself; nil: unknown.
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

// beat tells the other end that this process is running. It returns false after this end has sent
// another message.
func (l *Link) beat(v any) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.said && l.enc.Encode(v) == nil
}

// speak ends the beats, because the message that the other end waits for follows.
func (l *Link) speak() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.said = true
}

// seen records a beat of the other end, which contains its host and process.
func (l *Link) seen(here string) {
	l.heard.Add(1)
	l.place.Store(&here)
}

// patient breaks the stream if nothing is received from the other end for the timeout. The caller
// must call heard when it has received its message.
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

// name returns the rank of the other end, and where its process runs.
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

// linger waits before it reports the end of the stream as the end of the process: the watchdog of
// the collectives also notices that, and its error has more details. A stream ended by Break has
// reported its error already.
func (l *Link) linger() {
	if l.why.Load() == nil {
		time.Sleep(endGrace)
	}
}

const endGrace = 300 * time.Millisecond

// Break ends the stream because the job has ended with err. Pending receives return err.
func (l *Link) Break(err error) {
	l.why.CompareAndSwap(nil, &err)
	_ = l.Close()
}

// Hello is a process's first message, which describes it as if it ran one rank: see In.
type Hello struct {
	Rank  int
	Host  string
	Build string // build of the program
	// Rounding describes how the CPU rounds sums of bf16 products.
	Rounding string
	// Terms has settings, by name, that must be equal on all processes. A setting that one process
	// lacks is not compared. Refused is the reason why this process cannot run the job; "": it can.
	Terms   map[string]string
	Refused string
	Caps    [graph.NumSpaces]int64 // bytes of memory that a rank of the process may use; 0: no cap
	// LocalRanks is the number of ranks on its host, LocalRank its index among them; 0 and 0
	// if unknown.
	LocalRanks, LocalRank int
	Here                  string // if not "": only a beat, with the host and process
	Memory                int64  // bytes that the complete job may use on its host; 0: not known
	Disk                  int64  // bytes free in the folder that Task.Disk asks for; 0: not known
	Unwritable            string // why this process cannot write in that folder, if the plan uses it; "": it can
}

// In returns h for a process that runs the given number of ranks; h.Rank becomes the first of them.
func (h Hello) In(ranks int) Hello {
	h.Rank, h.LocalRanks, h.LocalRank = h.Rank*ranks, h.LocalRanks*ranks, h.LocalRank*ranks
	return h
}

// Aligned says whether the ranks of its host are consecutive and begin at a multiple of their
// number.
func (h Hello) Aligned() bool { return h.LocalRanks > 0 && h.Rank%h.LocalRanks == h.LocalRank }

// Differs returns the reason why two processes cannot run one job; "" if they can.
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

// shown formats a value of Terms for errors.
func shown(v string) string {
	if v == "" {
		return "none"
	}
	return fmt.Sprintf("%.80s", strings.Trim(strconv.Quote(v), `"`))
}

// Task is the leader's answer to a Hello. It gives the work, or says that there is none.
type Task struct {
	Config  []byte // nil: there is no work
	Program string // hash of the program and its layout
	Err     string // reason why there is no work; "" if there was no error
	Differs bool   // the processes do not match: each ends with Err
	Disk    string // if not "": not a task yet, but a question about the disk space and permissions of this folder: see Hello
	Here    string // if not "": only a beat, with the leader's host and process
}

// opened is the answer to a Task.
type opened struct{ Err *wireError }
