//go:build linux

package nccltest

import (
	"encoding/gob"
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-ml/spillway/comm/nccl"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
)

// Wire is a double of NCCL between processes of this host, each with its own driver double. As with
// the library, ranks find each other only by an ID, and a rank that waits for a dead peer waits
// until its communicator is aborted.
//
// An ID is the address of a hub in the process that made it, or, with NCCL_COMM_ID, in rank 0's
// process. All data between ranks passes through the hub.
type Wire struct {
	d       *drivertest.Driver
	takes   int64
	version int

	mu     sync.Mutex
	comms  map[nccl.Comm]*wired
	next   nccl.Comm
	open   map[int]*wireGroup // by thread
	links  []*link
	faults []error

	hubs sync.WaitGroup
}

var _ nccl.API = (*Wire)(nil)

// NewWire returns the library of a process whose GPUs are those of d. Each communicator uses takes
// bytes of its GPU.
func NewWire(d *drivertest.Driver, version int, takes int64) *Wire {
	return &Wire{d: d, version: version, takes: takes, comms: map[nccl.Comm]*wired{}, open: map[int]*wireGroup{}}
}

// letter is a message between ranks, which are given by their numbers at the hub.
type letter struct {
	From, To int
	Comm     uint64
	Kind     string // "ncclSend", "ncclAllGather" …; greeting, ready and ncclCommSplit
	Number   int    // of a collective or split in its communicator; of a greeting: the ranks
	Color    int
	Key      int
	Without  []int // of a shrinking
	Bytes    []byte
}

const (
	greeting  = "greeting"
	ready     = "ready"
	splitting = "ncclCommSplit"
	shrinkage = "ncclCommShrink"
)

// box identifies a queue of waiting letters: those of one rank, communicator and kind. Sends, and
// calls of all ranks, arrive in the order in which they were sent.
type box struct {
	comm uint64
	from int
	sort string
}

func sortOf(kind string) string {
	switch kind {
	case "ncclSend", splitting, shrinkage:
		return kind
	}
	return "collective"
}

// link is a rank's connection to the hub.
type link struct {
	self  int
	ready atomic.Bool

	mu    sync.Mutex // of conn and boxes: letters are taken in while one is sent
	conn  net.Conn
	boxes map[box][]letter

	sending sync.Mutex
	out     *gob.Encoder
}

// wired is one rank's handle of a communicator.
type wired struct {
	id     uint64
	ranks  []int // at the hub, by rank
	rank   int
	device int
	link   *link
	count  int // of collectives
	splits int
	asked  *asking // a split or shrinking that is under way
	final  bool
	dead   atomic.Bool
}

// asking is a split in progress, with the colors and keys received so far.
type asking struct {
	number, color int
	key           int
	into          *nccl.Comm
	without       []int // not nil: a shrinking, of all others
}

func (w *Wire) Version() (int, error) { return w.version, nil }

// UniqueID starts a hub, unless NCCL_COMM_ID gives the address of a future one.
func (w *Wire) UniqueID() (id nccl.ID, err error) {
	if at := os.Getenv("NCCL_COMM_ID"); at != "" {
		copy(id[:], at)
		return id, nil
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return id, err
	}
	w.serve(l)
	copy(id[:], l.Addr().String())
	return id, nil
}

func (w *Wire) serve(l net.Listener) { w.hubs.Go(func() { hub(l) }) }

// hub accepts all connections, announces that all ranks are present, and forwards letters until all
// have closed their connections.
func hub(l net.Listener) {
	defer l.Close()
	type end struct {
		sync.Mutex
		*gob.Encoder
	}
	ends := map[int]*end{}
	var ways []*gob.Decoder
	for want := 1; len(ends) < want; {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		in, hello := gob.NewDecoder(conn), letter{}
		if in.Decode(&hello) != nil {
			continue
		}
		want = hello.Number
		ends[hello.From] = &end{Encoder: gob.NewEncoder(conn)}
		ways = append(ways, in)
	}
	for _, e := range ends {
		_ = e.Encode(letter{Kind: ready}) // a rank that died is detected by the others themselves
	}
	var passing sync.WaitGroup
	defer passing.Wait()
	for _, in := range ways {
		passing.Go(func() {
			for {
				var x letter
				if in.Decode(&x) != nil {
					return
				}
				e := ends[x.To]
				e.Lock()
				_ = e.Encode(x)
				e.Unlock()
			}
		})
	}
}

// dial connects to the hub, which may not have started yet, and receives letters.
func (k *link) dial(at string, ranks int) {
	defer crash.Guard()
	for {
		conn, err := net.Dial("tcp", at)
		if err != nil {
			time.Sleep(time.Millisecond)
			continue
		}
		k.mu.Lock()
		k.conn = conn
		k.mu.Unlock()
		k.sending.Lock()
		k.out = gob.NewEncoder(conn)
		err = k.out.Encode(letter{Kind: greeting, From: k.self, Number: ranks})
		k.sending.Unlock()
		in := gob.NewDecoder(conn)
		for err == nil {
			var x letter
			if err = in.Decode(&x); err != nil {
				return
			}
			if x.Kind == ready {
				k.ready.Store(true)
				continue
			}
			b := box{x.Comm, x.From, sortOf(x.Kind)}
			k.mu.Lock()
			k.boxes[b] = append(k.boxes[b], x)
			k.mu.Unlock()
		}
		return
	}
}

func (k *link) send(x letter) error {
	x.From = k.self
	k.sending.Lock()
	defer k.sending.Unlock()
	return k.out.Encode(x)
}

func (k *link) has(b box, n int) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.boxes[b]) >= n
}

// take returns the first letter of a box that is not empty.
func (k *link) take(b box) letter {
	k.mu.Lock()
	defer k.mu.Unlock()
	x := k.boxes[b][0]
	k.boxes[b] = k.boxes[b][1:]
	return x
}

func (w *Wire) wrong(call, format string, args ...any) error {
	text := fmt.Sprintf(format, args...)
	w.faults = append(w.faults, fmt.Errorf("%s: %s", call, text))
	return &nccl.Error{Call: call, Code: nccl.InvalidUsage, Text: text}
}

func (w *Wire) Init(into *nccl.Comm, ranks int, id nccl.ID, rank int, _ nccl.Config) error {
	device := w.d.Current()
	w.mu.Lock()
	defer w.mu.Unlock()
	const call = "ncclCommInitRankConfig"
	if device < 0 || rank < 0 || rank >= ranks {
		return w.wrong(call, "rank %d of %d on device %d", rank, ranks, device)
	}
	at := string(id[:slices.Index(id[:], 0)])
	if rank == 0 && at == os.Getenv("NCCL_COMM_ID") {
		l, err := net.Listen("tcp", at)
		if err != nil {
			return &nccl.Error{Call: call, Code: 2, Text: err.Error()}
		}
		w.serve(l)
	}
	c := &wired{rank: rank, device: device, link: &link{self: rank, boxes: map[box][]letter{}}}
	for i := range ranks {
		c.ranks = append(c.ranks, i)
	}
	w.links = append(w.links, c.link)
	go c.link.dial(at, ranks)
	*into = w.add(c)
	return w.d.Take(call, w.takes)
}

func (w *Wire) add(c *wired) nccl.Comm {
	w.next++
	w.comms[w.next] = c
	return w.next
}

// find returns a handle's rank. The caller holds mu.
func (w *Wire) find(call string, c nccl.Comm) (*wired, error) {
	if m := w.comms[c]; m != nil {
		return m, nil
	}
	return nil, w.wrong(call, "a communicator that does not exist (%d)", c)
}

// settled is find for calls that need an idle communicator.
func (w *Wire) settled(call string, c nccl.Comm, device int) (*wired, error) {
	m, err := w.find(call, c)
	switch {
	case err != nil:
	case w.busy(m):
		err = w.wrong(call, "rank %d has something under way", m.rank)
	case m.device != device:
		err = w.wrong(call, "rank %d is on device %d, and that of this thread is %d", m.rank, m.device, device)
	case m.final:
		err = w.wrong(call, "rank %d has finalized the communicator", m.rank)
	}
	return m, err
}

// busy reports whether the ranks are still meeting, and completes a split that all have joined.
func (w *Wire) busy(m *wired) bool {
	if !m.link.ready.Load() {
		return true
	}
	if m.asked == nil {
		return false
	}
	a, kind := m.asked, splitting
	if a.without != nil {
		kind = shrinkage
	}
	for i, r := range m.ranks {
		if r != m.link.self && !slices.Contains(a.without, i) && !m.link.has(box{m.id, r, kind}, 1) {
			return true
		}
	}
	m.asked = nil
	type one struct{ rank, key int }
	list := []one{{m.link.self, a.key}}
	for i, r := range m.ranks {
		if r == m.link.self || slices.Contains(a.without, i) {
			continue
		}
		x := m.link.take(box{m.id, r, kind})
		if x.Number != a.number || !slices.Equal(x.Without, a.without) {
			_ = w.wrong(kind, "rank %d is in number %d, without %v, and rank %d in %d, without %v", m.rank, a.number, a.without, i, x.Number, x.Without)
		}
		if x.Color == a.color {
			list = append(list, one{r, x.Key})
		}
	}
	slices.SortFunc(list, func(a, b one) int { return a.key - b.key })
	h := fnv.New64a()
	fmt.Fprint(h, kind, m.id, " ", a.number, " ", a.color)
	child := &wired{id: h.Sum64(), device: m.device, link: m.link}
	for i, o := range list {
		child.ranks = append(child.ranks, o.rank)
		if o.rank == m.link.self {
			child.rank = i
		}
	}
	*a.into = w.add(child)
	return false
}

func (w *Wire) Split(c nccl.Comm, into *nccl.Comm, color, key int, _ nccl.Config) error {
	device := w.d.Current()
	w.mu.Lock()
	defer w.mu.Unlock()
	m, err := w.settled(splitting, c, device)
	if err != nil {
		return err
	}
	m.splits++
	m.asked = &asking{number: m.splits, color: color, key: key, into: into}
	for _, r := range m.ranks {
		if r != m.link.self {
			err = errors.Join(err, m.link.send(letter{To: r, Comm: m.id, Kind: splitting, Number: m.splits, Color: color, Key: key}))
		}
	}
	return err
}

func (w *Wire) Shrinks() error { return shrinks(w.version) }

func (w *Wire) Shrink(c nccl.Comm, without []int, into *nccl.Comm, _ nccl.Config) error {
	device := w.d.Current()
	w.mu.Lock()
	defer w.mu.Unlock()
	m, err := w.settled(shrinkage, c, device)
	if err == nil {
		err = shrinks(w.version)
	}
	if err != nil {
		return err
	}
	if err := excluding(m.rank, len(m.ranks), without); err != nil {
		return w.wrong(shrinkage, "%v", err)
	}
	if m.count > 0 {
		return w.wrong(shrinkage, "rank %d has called %d collectives of what it shrinks", m.rank, m.count)
	}
	m.splits++
	m.asked = &asking{number: m.splits, key: m.rank, into: into, without: slices.Clone(without)}
	for i, r := range m.ranks {
		if r != m.link.self && !slices.Contains(without, i) {
			err = errors.Join(err, m.link.send(letter{To: r, Comm: m.id, Kind: shrinkage, Number: m.splits, Key: m.rank, Without: without}))
		}
	}
	return err
}

func (w *Wire) State(c nccl.Comm) (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	m, err := w.find("ncclCommGetAsyncError", c)
	return err == nil && w.busy(m), err
}

func (w *Wire) Finalize(c nccl.Comm) error {
	device := w.d.Current()
	w.mu.Lock()
	defer w.mu.Unlock()
	m, err := w.settled("ncclCommFinalize", c, device)
	if err == nil {
		m.final = true
	}
	return err
}

func (w *Wire) Destroy(c nccl.Comm) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	m, err := w.find("ncclCommDestroy", c)
	if err == nil && !m.final {
		err = w.wrong("ncclCommDestroy", "rank %d has not finalized the communicator", m.rank)
	}
	delete(w.comms, c)
	return err
}

func (w *Wire) Abort(c nccl.Comm) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	m, err := w.find("ncclCommAbort", c)
	if err == nil {
		m.dead.Store(true)
	}
	delete(w.comms, c)
	return err
}

func (w *Wire) AllGather(send, recv driver.Address, bytes int64, c nccl.Comm, s driver.Stream) error {
	return w.call(&wireCall{name: "ncclAllGather", at: send, out: recv, bytes: bytes, stream: s}, c)
}

func (w *Wire) Broadcast(buf driver.Address, bytes int64, root int, c nccl.Comm, s driver.Stream) error {
	return w.call(&wireCall{name: "ncclBroadcast", at: buf, bytes: bytes, peer: root, stream: s}, c)
}

func (w *Wire) Send(buf driver.Address, bytes int64, to int, c nccl.Comm, s driver.Stream) error {
	return w.call(&wireCall{name: "ncclSend", at: buf, bytes: bytes, peer: to, stream: s}, c)
}

func (w *Wire) Recv(buf driver.Address, bytes int64, from int, c nccl.Comm, s driver.Stream) error {
	return w.call(&wireCall{name: "ncclRecv", at: buf, bytes: bytes, peer: from, stream: s}, c)
}

// Close returns an error that lists the faults and unreleased communicators. A hub in this process
// first waits until all others have closed.
func (w *Wire) Close() error {
	w.mu.Lock()
	links := w.links
	w.mu.Unlock()
	for _, k := range links {
		k.mu.Lock()
		if k.conn != nil {
			_ = k.conn.Close()
		}
		k.mu.Unlock()
	}
	w.hubs.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	errs := slices.Clone(w.faults)
	for _, c := range w.comms {
		errs = append(errs, fmt.Errorf("leak: the communicator of rank %d of %d", c.rank, len(c.ranks)))
	}
	return errors.Join(errs...)
}
