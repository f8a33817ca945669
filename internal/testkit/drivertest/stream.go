//go:build linux

package drivertest

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

type stream struct {
	id    driver.Stream
	gpu   int
	agent *agent
	queue []item
	depth int // operations of the queue, and the one that runs
	busy  bool
	into  *capture // what is enqueued is collected there; nil: it runs
}

// point is one record of an event.
type point struct {
	clock clock
	at    time.Time
	done  bool
}

type event struct {
	gpu    int
	timed  bool
	latest *point // nil: never recorded
}

// item is one entry of a stream's queue; which fields are set says what it does.
type item struct {
	label         string
	host          clock // of the thread that enqueued it
	run           func() error
	reads, writes []driver.Range
	check         bool // reads and writes are those of what follows
	peers         bool // it is a copy between devices: the driver's own
	record, wait  *point
	until         func() bool // to wait for
	word          *uint32     // to wait for, or to store to
	at            driver.Address
	value         uint32
	store         bool
	inGraph       bool // a graph's, behind its first: it takes no place in the stream
}

// push enqueues an item. The caller holds mu.
func (d *Driver) push(call string, s driver.Stream, i item) error {
	q := d.streams[s]
	if q == nil {
		d.fault("%s on stream %d, which does not exist", call, s)
		return failure(call, 400, "no such stream")
	}
	if q.into != nil {
		return q.into.add(call, i)
	}
	i.host = d.races.thread(unix.Gettid()).clock
	if !i.check && !i.inGraph {
		if q.depth >= d.opts.Depth {
			d.blocked++
			d.await(call, q.gpu, func() bool { return q.depth < d.opts.Depth })
			d.blocked--
			d.cond.Broadcast()
		}
		q.depth++
	}
	q.queue = append(q.queue, i)
	d.cond.Broadcast()
	return nil
}

// stuck is how long a driver call may wait for work before the double reports it as endless.
const stuck = 2 * time.Minute

// await blocks a call until a condition is true or the context is lost.
func (d *Driver) await(call string, gpu int, ok func() bool) {
	began := time.Now()
	look := time.AfterFunc(stuck, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.cond.Broadcast()
	})
	defer look.Stop()
	for !ok() && d.gpus[gpu].sticky == nil {
		if time.Since(began) >= stuck {
			d.fault("%s waits for work that does not end", call)
			d.lose(gpu, failure(call, 702, "it waits for work that does not end"))
			d.cond.Broadcast()
			return
		}
		d.cond.Wait()
	}
}

// ready reports whether the head of a queue can run.
func (s *stream) ready() bool {
	if s.busy || len(s.queue) == 0 {
		return false
	}
	switch i := &s.queue[0]; {
	case i.wait != nil:
		return i.wait.done
	case i.until != nil:
		return i.until()
	case i.word != nil && !i.store:
		return int32(atomic.LoadUint32(i.word)-i.value) >= 0
	}
	return true
}

// pick returns a stream whose head can run, or nil. It also reports whether a stream waits for a
// value, whose change is not announced.
func (d *Driver) pick() (found *stream, poll bool) {
	if d.opts.Seed != 0 {
		if d.era--; d.era < 0 {
			d.era = d.rng.IntN(60)
			for _, s := range d.order {
				d.rank[s] = d.rng.IntN(1 << 20)
			}
		}
	}
	for k := range d.order {
		s := d.order[k]
		if d.opts.Seed == 0 { // each in turn
			s = d.order[(k+d.ran)%len(d.order)]
		}
		if s.ready() && (found == nil || d.opts.Seed != 0 && d.rank[s] < d.rank[found]) {
			found = s
		}
		poll = poll || len(s.queue) > 0 && (s.queue[0].word != nil || s.queue[0].until != nil)
	}
	return found, poll
}

// work runs the streams' operations until the double is closed.
func (d *Driver) work() {
	defer d.wg.Done()
	debug.SetPanicOnFault(true) // access outside an allocation hits an inaccessible page
	d.mu.Lock()
	defer d.mu.Unlock()
	idle := 0
	for {
		for i := range d.gpus {
			if d.gpus[i].sticky != nil {
				d.drop(i)
			}
		}
		s, poll := d.pick()
		switch {
		case s != nil:
			idle = 0
			d.step(s)
		case d.closed:
			return
		case poll:
			if idle++; idle < 50 {
				d.mu.Unlock()
				runtime.Gosched()
				d.mu.Lock()
				continue
			}
			d.mu.Unlock()
			time.Sleep(time.Duration(min(idle-30, 1000)) * time.Microsecond) // longer where much was waited already
			d.mu.Lock()
		default:
			d.cond.Wait()
			if d.opts.Seed != 0 && d.rng.IntN(8) == 0 { // let queues fill
				d.mu.Unlock()
				time.Sleep(50 * time.Microsecond)
				d.mu.Lock()
			}
		}
	}
}

// drop empties the queues of a lost context. Waits for its events end, so order is no longer
// checked.
func (d *Driver) drop(gpu int) {
	d.races.abandoned = true
	for _, s := range d.order {
		if s.gpu != gpu || len(s.queue) == 0 {
			continue
		}
		for _, i := range s.queue {
			if i.record != nil {
				i.record.done = true
			}
		}
		s.queue, s.depth = s.queue[:0], 0
		d.cond.Broadcast()
	}
}

// step runs the head of a queue. The caller holds mu, which is released while the work runs.
func (d *Driver) step(s *stream) {
	i := s.queue[0]
	s.agent.clock.join(i.host)
	var err error
	switch {
	case i.check:
		err = d.accesses(s.agent, s.gpu, i.label, i.reads, i.writes)
	case i.until != nil:
	case i.wait != nil:
		s.agent.clock.join(i.wait.clock)
	case i.record != nil:
		i.record.clock, i.record.at, i.record.done = slices.Clone(s.agent.clock), time.Now(), true
	case i.word != nil:
		if _, err = d.reach(driver.Range{At: i.at, Len: 4}); err != nil {
			d.fault("%s of freed memory: %v", i.label, err)
			break
		}
		if i.store {
			c := d.races.words[i.at]
			c.join(s.agent.clock)
			d.races.words[i.at] = c
			atomic.StoreUint32(i.word, i.value)
		} else {
			s.agent.clock.join(d.races.words[i.at])
		}
	default:
		d.ran++
		if code, told := d.failRun[d.ran]; told {
			d.lose(s.gpu, failure("", code, "as told, in %s", quote(i.label)))
			break
		}
		gpu := s.gpu
		if i.peers {
			gpu = anywhere
		}
		if err = d.accesses(s.agent, gpu, i.label, i.reads, i.writes); err == nil {
			s.busy = true
			d.mu.Unlock()
			err = call(i.run)
			d.mu.Lock()
			s.busy = false
		}
	}
	if err != nil {
		code := 719
		if _, bounds := err.(*crash); bounds || i.check {
			code = 700
		}
		d.lose(s.gpu, failure("", code, "%s: %v", quote(i.label), err))
	}
	if len(s.queue) > 0 { // a lost context has none
		if !i.check && !i.inGraph {
			s.depth--
		}
		s.queue[0] = item{}
		s.queue = s.queue[1:]
	}
	d.cond.Broadcast()
}

// lose ends a device's context: every later call in it returns e.
func (d *Driver) lose(gpu int, e *driver.Error) {
	if d.gpus[gpu].sticky == nil {
		d.gpus[gpu].sticky = e
	}
}

// crash is a fault of the memory.
type crash struct{ text string }

func (c *crash) Error() string { return c.text }

// call runs work. It returns a panic as an error, including one from an access to inaccessible
// memory.
func call(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			if e, ok := r.(interface{ Addr() uintptr }); ok {
				err = &crash{fmt.Sprintf("it reached unreadable memory at %#x", e.Addr())}
				return
			}
			err = fmt.Errorf("it panicked: %v", r)
		}
	}()
	return f()
}

// NewStream creates a stream.
func (d *Driver) NewStream() (driver.Stream, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.enter("cuStreamCreate"); err != nil {
		return 0, err
	}
	d.await("cuStreamCreate", d.here(), func() bool { return d.blocked == 0 })
	id := driver.Stream(d.handle())
	s := &stream{id: id, gpu: d.here(), agent: d.races.agent(fmt.Sprintf("stream %d", id))}
	d.streams[id] = s
	d.order = append(d.order, s)
	return id, nil
}

// DestroyStream destroys a stream after its work has run, as the driver does.
func (d *Driver) DestroyStream(id driver.Stream) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := d.teardown("cuStreamDestroy_v2")
	s := d.streams[id]
	if s == nil {
		d.fault("cuStreamDestroy_v2 of stream %d, which does not exist", id)
		return failure("cuStreamDestroy_v2", 400, "no such stream")
	}
	d.drain(s)
	delete(d.streams, id)
	d.order = slices.DeleteFunc(d.order, func(o *stream) bool { return o == s })
	return err
}

// drain waits until a stream has run everything.
func (d *Driver) drain(s *stream) {
	for len(s.queue) > 0 || s.busy {
		d.cond.Wait()
	}
}

// drainAll waits until no stream of a device has work, as a driver does to load code.
func (d *Driver) drainAll(call string, gpu int) {
	d.await(call, gpu, func() bool {
		for _, s := range d.order {
			if s.gpu == gpu && (len(s.queue) > 0 || s.busy) {
				return false
			}
		}
		return true
	})
}

// Synchronize waits until a stream has run everything.
func (d *Driver) Synchronize(id driver.Stream) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	const call = "cuStreamSynchronize"
	if err := d.enter(call); err != nil {
		return err
	}
	s := d.streams[id]
	if s == nil {
		d.fault("%s of stream %d, which does not exist", call, id)
		return failure(call, 400, "no such stream")
	}
	d.drain(s)
	if err := d.lost(s.gpu, call); err != nil {
		return err
	}
	d.hostJoins(s.agent.clock)
	return nil
}

// hostJoins orders the calling thread's next operations after a clock. A thread's clock is never
// changed in place, because items hold it.
func (d *Driver) hostJoins(c clock) {
	t := d.races.thread(unix.Gettid())
	fresh := slices.Clone(t.clock)
	fresh.join(c)
	t.clock = fresh
}

// NewEvent creates an event.
func (d *Driver) NewEvent(timed bool) (driver.Event, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.enter("cuEventCreate"); err != nil {
		return 0, err
	}
	d.await("cuEventCreate", d.here(), func() bool { return d.blocked == 0 })
	id := driver.Event(d.handle())
	d.events[id] = &event{gpu: d.here(), timed: timed}
	return id, nil
}

// DestroyEvent destroys an event.
func (d *Driver) DestroyEvent(e driver.Event) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := d.teardown("cuEventDestroy_v2")
	if d.events[e] == nil {
		d.fault("cuEventDestroy_v2 of event %d, which does not exist", e)
		return failure("cuEventDestroy_v2", 400, "no such event")
	}
	delete(d.events, e)
	return err
}

func (d *Driver) event(call string, e driver.Event) (*event, error) {
	if err := d.enter(call); err != nil {
		return nil, err
	}
	ev := d.events[e]
	if ev == nil {
		d.fault("%s of event %d, which does not exist", call, e)
		return nil, failure(call, 400, "no such event")
	}
	return ev, nil
}

// Record enqueues a record.
func (d *Driver) Record(e driver.Event, s driver.Stream) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	ev, err := d.event("cuEventRecord", e)
	if err != nil {
		return err
	}
	if q := d.streams[s]; q != nil {
		if err := d.own("cuEventRecord", fmt.Sprintf("event %d", e), ev.gpu, q.gpu); err != nil {
			return err
		}
	}
	p := &point{}
	if err := d.push("cuEventRecord", s, item{label: "record", record: p}); err != nil {
		return err
	}
	ev.latest = p
	return nil
}

// Wait enqueues a wait for the event's latest record.
func (d *Driver) Wait(s driver.Stream, e driver.Event) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	ev, err := d.event("cuStreamWaitEvent", e)
	if err != nil || ev.latest == nil {
		return err
	}
	return d.push("cuStreamWaitEvent", s, item{label: "wait", wait: ev.latest})
}

// Done reports whether the work before the event's latest record has run.
func (d *Driver) Done(e driver.Event) (bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	ev, err := d.event("cuEventQuery", e)
	if err != nil {
		return false, err
	}
	if ev.latest == nil {
		return true, nil
	}
	if ev.latest.done {
		d.hostJoins(ev.latest.clock)
	}
	return ev.latest.done, nil
}

// Elapsed returns the time between two records that have run.
func (d *Driver) Elapsed(from, to driver.Event) (float32, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	const call = "cuEventElapsedTime"
	a, err := d.event(call, from)
	if err != nil {
		return 0, err
	}
	b := d.events[to]
	if b == nil || !a.timed || !b.timed || a.latest == nil || b.latest == nil || a.gpu != b.gpu {
		return 0, failure(call, 400, "want two timed events of a device that were recorded")
	}
	if !a.latest.done || !b.latest.done {
		return 0, &driver.Error{Call: call, Code: 600, Name: "CUDA_ERROR_NOT_READY"}
	}
	return float32(b.latest.at.Sub(a.latest.at).Seconds() * 1e3), nil
}

func (d *Driver) wordAt(call string, at driver.Address) (*uint32, error) {
	if d.opts.NoStreamMemOps {
		return nil, failure(call, 801, "the device has no stream memory operations")
	}
	m, err := d.reach(driver.Range{At: at, Len: 4})
	if err == nil && at%4 != 0 {
		err = fmt.Errorf("address %#x is not a multiple of 4", uint64(at))
	}
	if err != nil {
		d.fault("%s: %v", call, err)
		return nil, failure(call, 1, "%v", err)
	}
	return (*uint32)(unsafe.Pointer(&m.data[at-m.at])), nil
}

// WriteValue enqueues a store.
func (d *Driver) WriteValue(s driver.Stream, at driver.Address, v uint32) error {
	return d.valueItem("cuStreamWriteValue32_v2", s, at, v, true)
}

// WaitValue enqueues a wait for a value.
func (d *Driver) WaitValue(s driver.Stream, at driver.Address, v uint32) error {
	return d.valueItem("cuStreamWaitValue32_v2", s, at, v, false)
}

func (d *Driver) valueItem(call string, s driver.Stream, at driver.Address, v uint32, store bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.enter(call); err != nil {
		return err
	}
	w, err := d.wordAt(call, at)
	if err != nil {
		return err
	}
	return d.push(call, s, item{label: call, word: w, at: at, value: v, store: store})
}

// Access implements driver.Observer.
func (d *Driver) Access(label string, s driver.Stream, reads, writes []driver.Range) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if q := d.streams[s]; q == nil || d.gpus[q.gpu].sticky == nil {
		_ = d.push("Access", s, item{label: label, check: true, reads: slices.Clone(reads), writes: slices.Clone(writes)}) // a fault is noted
	}
}

// Run enqueues a Go function that stands for a library's work. An error or panic of it loses the
// context, like a failed kernel. Access declares what it reads and writes.
func (d *Driver) Run(s driver.Stream, label string, f func() error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.enter("Run"); err != nil {
		return err
	}
	if err := d.ownStream("Run", s); err != nil {
		return err
	}
	return d.push("Run", s, item{label: label, run: f})
}

// Until enqueues a wait for an event in other streams or on the host, which stands for a library's
// work. f is called repeatedly with the double's lock held and must not call the double. The wait
// gives no order after what f sees.
func (d *Driver) Until(s driver.Stream, label string, f func() bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.enter("Until"); err != nil {
		return err
	}
	if err := d.ownStream("Until", s); err != nil {
		return err
	}
	return d.push("Until", s, item{label: label, until: f})
}

// Current returns the device whose context is current on the calling thread, or -1.
func (d *Driver) Current() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c := d.current[unix.Gettid()]; c != 0 {
		return int(c) - 0x1000
	}
	return -1
}
