package mpi

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/internal/dl"
	"github.com/spillway-ml/spillway/internal/thread"
)

// engine calls MPI, from one thread that looks after all that is under way. Where the
// library lets any thread call, one at a time, whoever waits for an exchange looks for it
// first itself (attend): to hand it over and back takes two wakings, each as long as a small
// operation.
type engine struct {
	lib         *lib
	rank, world int
	calls       sync.Mutex   // held while the library is called
	attended    atomic.Int64 // when attend last saw an end, since began
	began       time.Time
	submit      chan *exchange
	stop        chan bool // whether to finalize
	ended       chan error
	closed      chan struct{} // no more calls are made
}

// transfer is one message: n bytes at mem.
type transfer struct {
	send bool
	sync bool // a send that ends once the receiver has it
	peer int  // rank of the world
	tag  int
	mem  []byte
}

// exchange is messages, or collectives, that are under way together.
type exchange struct {
	list []transfer
	// check looks at what the first so many messages have brought, as soon as they are
	// there: what it does not accept ends the exchange with errRefused, the rest under way.
	first int
	check func() bool
	// met: the others have come to the same, and bytes are on their way.
	met bool
	// quiet messages are looked for now and then only: nobody waits for them.
	quiet bool
	done  chan error
	run   func() error // instead of messages: blocks the thread
	posts []post       // collectives, after the messages
	bytes int64        // of all

	poster *poster

	posted   bool
	requests []byte // of the library
	count    int
	ahead    int       // of them, those of the first messages
	until    time.Time // so long it is looked for without a sleep
}

// errRefused is the end of an exchange whose check has failed.
var errRefused = errors.New("mpi: what came first was not accepted")

// maxMessage is the longest message: MPI counts in 32 bits. Tests shorten it.
var maxMessage = 1 << 30

// How the engine waits, from the last time that anything moved: it looks without a
// pause for spinFor, and as long as its bytes need at 1 GB/s (the library moves them
// inside of calls only, and ranks have met before they send more than a header); until
// napFor in naps of its thread; then it sleeps, for a small part of what it has waited, until
// something is submitted: each waking of a thread with a locked goroutine takes another
// thread and some system calls, 100 µs of a core in a virtual machine. The runtime's timers
// are no finer than a millisecond where it is idle.
const (
	spinFor    = 100 * time.Microsecond
	spinByte   = time.Nanosecond
	napFor     = time.Millisecond
	nap        = 20 * time.Microsecond
	sleepPart  = 16
	firstSleep = 500 * time.Microsecond
	longSleep  = 10 * time.Millisecond
	metSleep   = time.Millisecond
	quietEvery = 10 * time.Millisecond
)

// startEngine starts MPI on a thread of its own.
func startEngine(l *lib, rank, world int) (*engine, error) {
	e := &engine{lib: l, rank: rank, world: world, began: time.Now(), submit: make(chan *exchange, 64), stop: make(chan bool, 1), ended: make(chan error, 1), closed: make(chan struct{})}
	began := make(chan error)
	go func() {
		defer crash.Guard()
		runtime.LockOSThread() // never given back: the thread is MPI's
		err := l.start(rank, world)
		began <- err
		if err == nil {
			e.loop()
		}
	}()
	if err := <-began; err != nil {
		return nil, err
	}
	return e, nil
}

// do runs messages that may be long in coming and returns when they are done.
func (e *engine) do(list []transfer) error { return e.wait(e.begin(list, false)) }

// attend starts x and looks for its end, for as long as it should take and until over.
// Where that has not come (done is false) the engine's thread is to be given x.
func (e *engine) attend(x *exchange, over *atomic.Bool) (done bool, err error) {
	if !e.lib.shared || !e.calls.TryLock() {
		return false, nil
	}
	err = e.post(x)
	e.calls.Unlock()
	if err != nil {
		return true, err
	}
	for look := 0; ; look++ {
		if e.calls.TryLock() { // else the other who calls moves this as well
			done, err = e.finished(x)
			e.calls.Unlock()
			if done || err != nil {
				e.attended.Store(int64(time.Since(e.began)))
				return true, err
			}
		}
		if over.Load() || time.Since(x.until) > attendFor {
			return false, nil
		}
		if look > eagerLooks {
			runtime.Gosched()
			yield()
		}
	}
}

// attendFor is how long attend looks beyond what the bytes need. Whoever gives up is a
// waking late when the others come, and the next operation finds them late in turn: so it
// is long against that, and short against a step. eagerLooks is how often it looks before
// it lets others have the runtime's processor and the core between looks: ranks, of this
// process too, may outnumber them, and another stream may compute here.
const (
	attendFor  = 2 * time.Millisecond
	eagerLooks = 20
)

func yield() { _, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// wait returns when messages are done, or the engine has ended.
func (e *engine) wait(x *exchange) error {
	select {
	case err := <-x.done:
		return err
	case <-e.closed:
		return errEnded
	}
}

// begin starts messages; the outcome comes on done.
func (e *engine) begin(list []transfer, quiet bool) *exchange {
	return e.start(&exchange{list: list, quiet: quiet})
}

// start gives the engine's thread messages and collectives, which it starts where they
// are not under way yet; the outcome comes on done.
func (e *engine) start(x *exchange) *exchange {
	x.done = make(chan error, 1)
	e.give(x)
	return x
}

// give hands x to the thread, or ends it where that has ended.
func (e *engine) give(x *exchange) {
	select {
	case e.submit <- x:
	case <-e.closed:
		x.done <- errEnded
	}
}

// post starts the messages and collectives of x.
func (e *engine) post(x *exchange) error {
	l := e.lib
	x.posted = true
	for i := range x.list {
		if i == x.first {
			x.ahead = x.count
		}
		n := len(x.list[i].mem)
		x.count += max(1, (n+maxMessage-1)/maxMessage)
		x.bytes += int64(n)
	}
	if x.first == len(x.list) {
		x.ahead = x.count
	}
	x.until = time.Now().Add(time.Duration(x.bytes) * spinByte)
	x.count += len(x.posts)
	x.requests = make([]byte, x.count*int(l.request)) // the library looks at it inside calls only
	at := 0
	for i := range x.list {
		t := &x.list[i]
		name, fn := "MPI_Irecv", l.fn.irecv
		switch {
		case t.send && t.sync:
			name, fn = "MPI_Issend", l.fn.issend
		case t.send:
			name, fn = "MPI_Isend", l.fn.isend
		}
		for off := 0; off == 0 || off < len(t.mem); off += maxMessage {
			piece := t.mem[off:min(len(t.mem), off+maxMessage)]
			request := address(x.requests) + uintptr(at)*l.request
			at++
			if err := l.check(name, dl.Call(fn, address(piece), uintptr(len(piece)), l.byteType, uintptr(t.peer), uintptr(t.tag), l.world, request)); err != nil {
				return err
			}
		}
	}
	x.poster = &poster{lib: l}
	for _, f := range x.posts {
		if err := f(x.poster, address(x.requests)+uintptr(at)*l.request); err != nil {
			return err
		}
		at++
	}
	return nil
}

// finished looks whether x is done.
func (e *engine) finished(x *exchange) (bool, error) {
	if x.check != nil {
		if done, err := e.testAll(x, 0, x.ahead); !done || err != nil {
			return done, err
		}
		if !x.check() {
			return true, errRefused
		}
		x.check = nil
	}
	done, err := e.testAll(x, x.ahead, x.count)
	if done && err == nil {
		err = x.poster.free()
	}
	return done, err
}

// testAll looks whether requests [from, to) of x are done.
func (e *engine) testAll(x *exchange, from, to int) (bool, error) {
	flag := int32(0)
	err := e.lib.check("MPI_Testall", dl.Call(e.lib.fn.testall, uintptr(to-from), address(x.requests)+uintptr(from)*e.lib.request, uintptr(unsafe.Pointer(&flag)), e.lib.ignore))
	return flag != 0, err
}

// loop starts messages and looks after them.
func (e *engine) loop() {
	var active []*exchange
	moved, looked := time.Now(), time.Time{}
	take := func(x *exchange) {
		if x.run != nil {
			x.done <- e.alone(x.run)
			return
		}
		if !x.posted {
			if err := e.alone(func() error { return e.post(x) }); err != nil {
				x.done <- err
				return
			}
			moved = time.Now()
		} else if looked := time.Now().Add(-attendFor); looked.After(moved) {
			moved = looked // so long somebody has waited for it
		}
		active = append(active, x)
	}
	for {
		for more := true; more; {
			select {
			case x := <-e.submit:
				take(x)
			case finalize := <-e.stop:
				e.end(finalize)
				return
			default:
				more = false
			}
		}
		now := time.Now()
		lookQuiet := now.Sub(looked) >= quietEvery
		if lookQuiet {
			looked = now
		}
		loud, busy, met := false, false, false
		for i := 0; i < len(active); {
			x := active[i]
			if x.quiet && !lookQuiet {
				i++
				continue
			}
			var done bool
			err := e.alone(func() (err error) {
				done, err = e.finished(x)
				return err
			})
			if !done && err == nil {
				loud, met = loud || !x.quiet, met || x.met
				busy = busy || !x.quiet && now.Sub(x.until) < spinFor
				i++
				continue
			}
			x.done <- err
			active[i] = active[len(active)-1]
			active = active[:len(active)-1]
			if !x.quiet {
				moved = time.Now()
			}
		}
		since := min(time.Since(moved), time.Since(e.began)-time.Duration(e.attended.Load()))
		if busy || loud && since < spinFor {
			yield()
			continue
		}
		if loud && since < napFor {
			thread.Nap(nap)
			continue
		}
		pause := longSleep
		if loud {
			pause = min(max(since/sleepPart, firstSleep), longSleep)
		}
		if met { // bytes move inside calls only
			pause = min(pause, metSleep)
		}
		select {
		case x := <-e.submit:
			take(x)
		case finalize := <-e.stop:
			e.end(finalize)
			return
		case <-time.After(pause):
		}
	}
}

// alone runs calls of the library, while nobody else does.
func (e *engine) alone(f func() error) error {
	e.calls.Lock()
	defer e.calls.Unlock()
	return f()
}

var errEnded = errors.New("mpi: the process has ended its part")

// inside is the call that the thread does not come back from, once it was told to stop.
func (e *engine) inside() string {
	select {
	case <-e.closed:
		return "MPI_Finalize"
	default:
		return "a call of MPI"
	}
}

// end stops calling MPI. Messages that are still under way are let go: their
// memory may be in use until the process ends.
func (e *engine) end(finalize bool) {
	e.calls.Lock() // nobody calls any more
	close(e.closed)
	var err error
	if finalize {
		err = e.lib.check("MPI_Finalize", dl.Call(e.lib.fn.finalize))
	}
	e.ended <- err
}
