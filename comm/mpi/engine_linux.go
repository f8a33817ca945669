package mpi

import (
	"errors"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/internal/crash"
)

// engine is the one thread of the process that calls MPI.
type engine struct {
	lib         *lib
	rank, world int
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
	// quiet messages are looked for now and then only: nobody waits for them.
	quiet bool
	done  chan error
	run   func() error // instead of messages: blocks the thread
	posts []post       // collectives, after the messages
	bytes int64        // of all

	poster *poster

	requests []byte // of the library
	count    int
	until    time.Time // so long it is looked for without a sleep
}

// maxMessage is the longest message: MPI counts in 32 bits. Tests shorten it.
var maxMessage = 1 << 30

// How the engine waits, from the last time that anything moved: it looks without a
// pause for spinFor, and as long as its bytes need at 1 GB/s (the library moves them
// inside of calls only, and ranks have met before they send more than a header); until
// napFor in naps of its thread; then it sleeps, twice as long each time, until something
// is submitted. The runtime's timers are no finer than a millisecond where it is idle.
const (
	spinFor    = 100 * time.Microsecond
	spinByte   = time.Nanosecond
	napFor     = time.Millisecond
	nap        = 20 * time.Microsecond
	firstSleep = 500 * time.Microsecond
	longSleep  = time.Millisecond
	quietSleep = 10 * time.Millisecond
)

// startEngine starts MPI on a thread of its own.
func startEngine(l *lib, rank, world int) (*engine, error) {
	e := &engine{lib: l, rank: rank, world: world, submit: make(chan *exchange, 64), stop: make(chan bool, 1), ended: make(chan error, 1), closed: make(chan struct{})}
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

// do runs messages and returns when they are done.
func (e *engine) do(list []transfer) error { return e.wait(e.begin(list, false)) }

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

// start starts messages and collectives; the outcome comes on done.
func (e *engine) start(x *exchange) *exchange {
	x.done = make(chan error, 1)
	for i := range x.list {
		x.bytes += int64(len(x.list[i].mem))
	}
	select {
	case e.submit <- x:
	case <-e.closed:
		x.done <- errEnded
	}
	return x
}

// post starts the messages and collectives of x.
func (e *engine) post(x *exchange) error {
	l := e.lib
	for i := range x.list {
		x.count += max(1, (len(x.list[i].mem)+maxMessage-1)/maxMessage)
	}
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
			if err := l.check(name, call(fn, address(piece), uintptr(len(piece)), l.byteType, uintptr(t.peer), uintptr(t.tag), l.world, request)); err != nil {
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
	flag := int32(0)
	err := e.lib.check("MPI_Testall", call(e.lib.fn.testall, uintptr(x.count), address(x.requests), uintptr(unsafe.Pointer(&flag)), e.lib.ignore))
	if flag != 0 && err == nil {
		err = x.poster.free()
	}
	return flag != 0, err
}

// loop starts messages and looks after them.
func (e *engine) loop() {
	var active []*exchange
	moved, looked := time.Now(), time.Time{}
	pause := firstSleep
	take := func(x *exchange) {
		if x.run != nil {
			x.done <- x.run()
			return
		}
		if err := e.post(x); err != nil {
			x.done <- err
			return
		}
		active = append(active, x)
		moved, pause = time.Now(), firstSleep
		x.until = moved.Add(spinFor + time.Duration(x.bytes)*spinByte)
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
		lookQuiet := now.Sub(looked) >= quietSleep
		if lookQuiet {
			looked = now
		}
		loud, busy := false, false
		for i := 0; i < len(active); {
			x := active[i]
			if x.quiet && !lookQuiet {
				i++
				continue
			}
			done, err := e.finished(x)
			if !done && err == nil {
				loud = loud || !x.quiet
				busy = busy || !x.quiet && now.Before(x.until)
				i++
				continue
			}
			x.done <- err
			active[i] = active[len(active)-1]
			active = active[:len(active)-1]
			if !x.quiet {
				moved, pause = time.Now(), firstSleep
			}
		}
		if busy || loud && time.Since(moved) < spinFor {
			_, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0) // ranks may outnumber the cores
			continue
		}
		if loud && time.Since(moved) < napFor {
			rest := unix.NsecToTimespec(int64(nap))
			_ = unix.Nanosleep(&rest, nil)
			continue
		}
		most := longSleep
		if !loud {
			most = quietSleep
		}
		select {
		case x := <-e.submit:
			take(x)
		case finalize := <-e.stop:
			e.end(finalize)
			return
		case <-time.After(pause):
			pause = min(2*pause, most)
		}
	}
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
	close(e.closed)
	var err error
	if finalize {
		err = e.lib.check("MPI_Finalize", call(e.lib.fn.finalize))
	}
	e.ended <- err
}
