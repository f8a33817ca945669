package mpi

import (
	"errors"
	"os"
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

// engine calls MPI from one thread, which polls all pending exchanges. If the library lets
// any thread call, one at a time, a goroutine that waits for an exchange first polls it itself
// (attend): handing it to the engine's thread and back costs two thread wake-ups, each as long
// as a small operation.
type engine struct {
	lib         *lib
	rank, world int
	calls       sync.Mutex   // held during calls of the library
	attended    atomic.Int64 // time since began at which attend last saw an exchange complete
	began       time.Time
	submit      chan *exchange
	stop        chan bool // tells the thread to end; true: with MPI_Finalize
	ended       chan error
	closed      chan struct{} // closed after the last call of the library
}

// transfer is one message: n bytes at mem.
type transfer struct {
	send bool
	sync bool // a synchronous send (MPI_Issend): complete once the receiver has begun to receive
	peer int  // rank of the other process in MPI_COMM_WORLD
	tag  int
	mem  []byte
}

// Tags of messages. The groups' tags follow, four for each slot.
const (
	tagBeat = iota + 1
	tagStream
	tagJoin
	tagGroups
)

// exchange is a set of messages or collectives that run together.
type exchange struct {
	list []transfer
	// check is called as soon as the first `first` messages are complete. If it returns
	// false, the exchange ends with errRefused while the other messages are still pending.
	first int
	check func() bool
	// met says that the other ranks have reached the same operation, so that bytes are
	// already moving.
	met bool
	// quiet exchanges are polled only occasionally, because no operation waits for them.
	quiet bool
	done  chan error
	run   func() error // a blocking call, in place of messages; it blocks the engine's thread
	posts []post       // collectives, started after the messages
	bytes int64        // total bytes of the exchange

	poster *poster

	posted   bool
	requests []byte // MPI request handles
	count    int
	ahead    int       // number of requests of the first messages
	until    time.Time // the engine polls the exchange without sleeping until then
}

// errRefused is the error of an exchange whose check returned false.
var errRefused = errors.New("mpi: what came first was not accepted")

// maxMessage is the longest message in bytes, because MPI counts in 32 bits. Tests reduce it.
var maxMessage = 1 << 30

// How the engine waits. Times count from the last progress:
//
//   - It polls without a pause for spinFor, plus the time that the pending bytes need at
//     1 GB/s. The library moves bytes only inside calls, and ranks have met before they send
//     more than a header.
//   - Until napFor it polls between short sleeps of its thread (naps).
//   - After that it sleeps for a small fraction of the time waited so far, or until an exchange
//     is submitted. Waking a thread with a locked goroutine costs another thread and some
//     system calls, 100 µs of a core in a virtual machine.
//
// Naps bypass the Go runtime, whose timers are no finer than a millisecond when it is idle.
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

// startEngine starts MPI on a separate thread.
func startEngine(l *lib, rank, world int) (*engine, error) {
	e := &engine{lib: l, rank: rank, world: world, began: time.Now(), submit: make(chan *exchange, 64), stop: make(chan bool, 1), ended: make(chan error, 1), closed: make(chan struct{})}
	began := make(chan error)
	go func() {
		defer crash.Guard()
		runtime.LockOSThread() // never unlocked: MPI was initialized on this thread
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

// do runs messages that may take long and returns when they are complete.
func (e *engine) do(list []transfer) error { return e.wait(e.begin(list, false)) }

// call runs f on the engine's thread. Meanwhile the thread sends no heartbeats.
func (e *engine) call(f func() error) error {
	x := &exchange{run: f, done: make(chan error, 1)}
	e.give(x)
	return e.wait(x)
}

// attend starts x on the caller's thread and polls it for the time that it should take, or
// until over is set. If x is not complete by then (done is false), the caller must give x to
// the engine's thread.
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
		if e.calls.TryLock() { // otherwise the thread that holds the lock makes progress for x too
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

// attendFor is how long attend polls in addition to the time that the bytes need. A rank
// that stops polling notices the others' arrival one wake-up late, and is then late for the
// next operation. So attendFor is long compared with a wake-up and short compared with a step.
// eagerLooks is how often attend polls before it yields the Go processor and the core between
// polls: there may be more ranks than cores, and another stream may compute here.
const (
	attendFor  = 2 * time.Millisecond
	eagerLooks = 20
)

func yield() { _, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// wait returns when an exchange is complete or the engine has ended.
func (e *engine) wait(x *exchange) error {
	select {
	case err := <-x.done:
		return err
	case <-e.closed:
		return errEnded
	}
}

// begin starts messages on the engine's thread. The exchange's channel done gets the result.
func (e *engine) begin(list []transfer, quiet bool) *exchange {
	return e.start(&exchange{list: list, quiet: quiet})
}

// start passes an exchange to the engine's thread, which starts it unless it has started
// already. Channel done gets the result.
func (e *engine) start(x *exchange) *exchange {
	x.done = make(chan error, 1)
	e.give(x)
	return x
}

// give passes x to the engine's thread. If the thread has ended, it ends x with an error.
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
	x.requests = make([]byte, x.count*int(l.request)) // Go memory: MPI accesses it only during calls
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

// finished polls whether x is complete.
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

// testAll polls whether requests [from, to) of x are complete.
func (e *engine) testAll(x *exchange, from, to int) (bool, error) {
	flag := int32(0)
	err := e.lib.check("MPI_Testall", dl.Call(e.lib.fn.testall, uintptr(to-from), address(x.requests)+uintptr(from)*e.lib.request, uintptr(unsafe.Pointer(&flag)), e.lib.ignore))
	return flag != 0, err
}

// loop is the engine's thread: it starts exchanges and polls them.
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

// alone runs f, which calls the library, while no other thread does.
func (e *engine) alone(f func() error) error {
	e.calls.Lock()
	defer e.calls.Unlock()
	return f()
}

var errEnded = errors.New("mpi: the process has ended its part")

// inside names the MPI call from which the thread has not returned after it was told to
// stop.
func (e *engine) inside() string {
	select {
	case <-e.closed:
		return "MPI_Finalize"
	default:
		return "a call of MPI"
	}
}

// end stops calling MPI. It abandons pending messages: MPI may use their memory until the
// process ends.
func (e *engine) end(finalize bool) {
	e.calls.Lock() // never unlocked: no thread may call MPI from here on
	close(e.closed)
	var err error
	if finalize {
		err = e.lib.check("MPI_Finalize", dl.Call(e.lib.fn.finalize))
	}
	e.ended <- err
}

// offHeap allocates n bytes outside the Go heap: MPI may access them between its calls,
// when Go may move or free heap memory.
func offHeap(n int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	return b, os.NewSyscallError("mmap", err)
}
