//go:build linux

package nccltest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/comm/nccl"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
)

// Options of a Fabric.
type Options struct {
	// Looks is the least number of times that State reports a communicator or a group of calls as
	// in progress. Default 0.
	Looks int
	// Takes is the device memory, in bytes, of a communicator on each rank.
	Takes int64
	// Root makes all ranks get the same id, as with an address in NCCL_COMM_ID.
	Root bool
}

// Fabric is the state shared by the libraries of all ranks.
type Fabric struct {
	d *drivertest.Driver
	o Options

	mu      sync.Mutex
	ids     uint64
	cliques map[nccl.ID]*clique
	comms   map[nccl.Comm]*member
	next    nccl.Comm
	open    map[int]*group // by thread
	calls   map[string]int
	fail    map[string]map[int]int // by call, count: the code
	held    map[int]*atomic.Bool   // by rank: whether its streams are held before their calls
	faults  []error
}

// clique is a communicator with all its ranks.
type clique struct {
	size     int
	members  map[int]*member // by rank
	splits   map[int]*split  // by number
	shrink   *shrinking      // nil: none was asked for
	pairs    map[[2]int]*pair
	together map[int]map[int]*call // collectives: by number, rank
}

// split is one split call of all ranks of a clique.
type split struct{ asked map[int]ask }

// shrinking is one shrink call of the ranks of a clique that stay.
type shrinking struct {
	without []int
	asked   map[int]*nccl.Comm
	size    int // of what is made
}

type ask struct {
	color, key int
	into       *nccl.Comm
}

// member is one rank's handle.
type member struct {
	f      *Fabric
	handle nccl.Comm
	of     *clique
	rank   int
	device int
	looks  int // that State is still to answer with busy
	splits int
	stream uintptr // of its calls; 0: none was made
	count  int     // of collectives
	work   []*batch
	err    *nccl.Error
	final  bool
}

// New returns a fabric over the devices of d.
func New(d *drivertest.Driver, o Options) *Fabric {
	return &Fabric{d: d, o: o, cliques: map[nccl.ID]*clique{}, comms: map[nccl.Comm]*member{}, open: map[int]*group{},
		calls: map[string]int{}, fail: map[string]map[int]int{}, held: map[int]*atomic.Bool{}}
}

// Fail makes the n-th call of a function ("ncclSend"), counted from 1 over all ranks, return a
// code.
func (f *Fabric) Fail(call string, n, code int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fail[call] == nil {
		f.fail[call] = map[int]int{}
	}
	f.fail[call][n] = code
}

// Break gives a rank an error, which State reports in all of its communicators except the first but
// ones.
func (f *Fabric) Break(rank, code, but int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range slices.Sorted(maps.Keys(f.comms)) {
		m := f.comms[c]
		if m.rank != rank {
			continue
		}
		if but--; but < 0 {
			m.err = &nccl.Error{Call: "ncclCommGetAsyncError", Code: code, Text: "as told"}
		}
	}
}

// Hold stops a rank's streams before their next call of any communicator, like a stopped process,
// or lets them continue.
func (f *Fabric) Hold(rank int, stop bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.holds(rank).Store(stop)
}

// holds returns a rank's entry in held. The caller holds mu.
func (f *Fabric) holds(rank int) *atomic.Bool {
	if f.held[rank] == nil {
		f.held[rank] = &atomic.Bool{}
	}
	return f.held[rank]
}

// Calls returns how often each call was made.
func (f *Fabric) Calls() map[string]int {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := map[string]int{}
	for k, v := range f.calls {
		m[k] = v
	}
	return m
}

// Close returns an error that lists all faults and everything that was not released.
func (f *Fabric) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	errs := slices.Clone(f.faults)
	for _, m := range f.comms {
		errs = append(errs, fmt.Errorf("leak: the communicator of rank %d of %d", m.rank, m.of.size))
	}
	for _, g := range f.open {
		errs = append(errs, fmt.Errorf("%d ncclGroupStart without an end", g.depth))
	}
	return errors.Join(errs...)
}

func (f *Fabric) fault(format string, args ...any) {
	if len(f.faults) < 20 {
		f.faults = append(f.faults, fmt.Errorf(format, args...))
	}
}

// enter counts a call. The caller holds mu.
func (f *Fabric) enter(call string) error {
	f.calls[call]++
	if code, told := f.fail[call][f.calls[call]]; told {
		return &nccl.Error{Call: call, Code: code, Text: "as told"}
	}
	return nil
}

func (f *Fabric) wrong(call, format string, args ...any) error {
	f.fault(call+": "+format, args...)
	return &nccl.Error{Call: call, Code: nccl.InvalidUsage, Text: fmt.Sprintf(format, args...)}
}

// Library returns the fabric as one process sees it, with a version of the library.
func (f *Fabric) Library(version int) nccl.API { return &library{f, version} }

type library struct {
	*Fabric
	version int
}

var _ nccl.API = (*library)(nil)

func (l *library) Version() (int, error) { return l.version, nil }

func (l *library) UniqueID() (id nccl.ID, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.o.Root || l.ids == 0 {
		l.ids++
	}
	binary.LittleEndian.PutUint64(id[:], l.ids)
	id[nccl.IDBytes-1] = 1
	return id, l.enter("ncclGetUniqueId")
}

func (l *library) Init(into *nccl.Comm, ranks int, id nccl.ID, rank int, _ nccl.Config) error {
	device := l.d.Current()
	l.mu.Lock()
	defer l.mu.Unlock()
	const call = "ncclCommInitRankConfig"
	if err := l.enter(call); err != nil {
		return err
	}
	c := l.cliques[id]
	if c == nil {
		c = newClique(ranks)
		l.cliques[id] = c
	}
	switch {
	case device < 0:
		return l.wrong(call, "no current context on this thread")
	case rank < 0 || rank >= ranks || ranks != c.size || c.members[rank] != nil:
		return l.wrong(call, "rank %d of %d of a communicator of %d", rank, ranks, c.size)
	}
	for _, m := range c.members {
		if m.device == device {
			return &nccl.Error{Call: call, Code: nccl.InvalidUsage, Text: fmt.Sprintf("Duplicate GPU detected: ranks %d and %d", m.rank, rank)}
		}
	}
	*into = l.join(c, rank, device).handle
	return l.d.Take(call, l.o.Takes)
}

func newClique(size int) *clique {
	return &clique{size: size, members: map[int]*member{}, splits: map[int]*split{}, pairs: map[[2]int]*pair{}, together: map[int]map[int]*call{}}
}

func (f *Fabric) join(c *clique, rank, device int) *member {
	f.next++
	m := &member{f: f, handle: f.next, of: c, rank: rank, device: device, looks: f.o.Looks}
	c.members[rank] = m
	f.comms[m.handle] = m
	return m
}

// find returns a handle's member. The caller holds mu.
func (f *Fabric) find(call string, c nccl.Comm) (*member, error) {
	if err := f.enter(call); err != nil {
		return nil, err
	}
	m := f.comms[c]
	if m == nil {
		return nil, f.wrong(call, "a communicator that does not exist (%d)", c)
	}
	if m.err != nil {
		e := *m.err
		return nil, &e
	}
	return m, nil
}

// ready is find for calls that need an idle communicator on the current device.
func (f *Fabric) ready(call string, c nccl.Comm, device int) (*member, error) {
	m, err := f.find(call, c)
	switch {
	case err != nil:
	case m.busy():
		err = f.wrong(call, "rank %d has something under way", m.rank)
	case m.device != device:
		err = f.wrong(call, "rank %d is on device %d, and that of this thread is %d", m.rank, m.device, device)
	case m.final:
		err = f.wrong(call, "rank %d has finalized the communicator", m.rank)
	}
	return m, err
}

// busy reports whether a meeting is in progress, or another operation that State must complete.
func (m *member) busy() bool {
	if len(m.of.members) < m.of.size || m.looks > 0 {
		return true
	}
	if k := m.of.shrink; k != nil && k.asked[m.rank] != nil && len(k.asked) < k.size {
		return true
	}
	s := m.of.splits[m.splits]
	return s != nil && len(s.asked) < m.of.size && m.splits > 0
}

func (l *library) State(c nccl.Comm) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m, err := l.find("ncclCommGetAsyncError", c)
	if err != nil {
		return false, err
	}
	busy := m.busy()
	m.looks = max(0, m.looks-1)
	return busy, nil
}

func (l *library) Split(c nccl.Comm, into *nccl.Comm, color, key int, _ nccl.Config) error {
	device := l.d.Current()
	l.mu.Lock()
	defer l.mu.Unlock()
	m, err := l.ready("ncclCommSplit", c, device)
	if err != nil {
		return err
	}
	m.splits++
	s := m.of.splits[m.splits]
	if s == nil {
		s = &split{asked: map[int]ask{}}
		m.of.splits[m.splits] = s
	}
	s.asked[m.rank] = ask{color, key, into}
	if len(s.asked) < m.of.size {
		return nil
	}
	byColor := map[int][]int{}
	for rank, a := range s.asked {
		byColor[a.color] = append(byColor[a.color], rank)
	}
	for _, ranks := range byColor {
		slices.SortFunc(ranks, func(a, b int) int { return s.asked[a].key - s.asked[b].key })
		child := newClique(len(ranks))
		for i, rank := range ranks {
			*s.asked[rank].into = l.join(child, i, m.of.members[rank].device).handle
		}
	}
	return nil
}

func (l *library) Shrinks() error { return shrinks(l.version) }

// shrinks returns an error if a version of the library has no ncclCommShrink.
func shrinks(version int) error {
	if version >= nccl.ShrinkVersion {
		return nil
	}
	return fmt.Errorf("the double is NCCL %s, which has no ncclCommShrink: want %s or later", nccl.VersionText(version), nccl.VersionText(nccl.ShrinkVersion))
}

// excluding returns an error if without is not a valid list of ranks for rank to exclude.
func excluding(rank, size int, without []int) error {
	if len(without) == 0 || !slices.IsSorted(without) || without[0] < 0 || without[len(without)-1] >= size || slices.Contains(without, rank) ||
		len(slices.Compact(slices.Clone(without))) != len(without) {
		return fmt.Errorf("rank %d of %d cannot exclude %v", rank, size, without)
	}
	return nil
}

// Shrink makes a communicator of the remaining ranks once all of them have called it with the same
// ranks to exclude. A communicator with an error is not shrunk, because the library checks for
// errors first.
func (l *library) Shrink(c nccl.Comm, without []int, into *nccl.Comm, _ nccl.Config) error {
	device := l.d.Current()
	l.mu.Lock()
	defer l.mu.Unlock()
	const call = "ncclCommShrink"
	m, err := l.ready(call, c, device)
	if err == nil {
		err = shrinks(l.version)
	}
	if err != nil {
		return err
	}
	if err := excluding(m.rank, m.of.size, without); err != nil {
		return l.wrong(call, "%v", err)
	}
	for _, b := range m.work {
		if !b.left.Load() {
			return l.wrong(call, "rank %d still runs %s", m.rank, b)
		}
	}
	k := m.of.shrink
	if k == nil {
		k = &shrinking{slices.Clone(without), map[int]*nccl.Comm{}, m.of.size - len(without)}
		m.of.shrink = k
	}
	if !slices.Equal(k.without, without) || k.asked[m.rank] != nil {
		return l.wrong(call, "rank %d goes on without %v, and others without %v", m.rank, without, k.without)
	}
	k.asked[m.rank] = into
	if len(k.asked) < k.size {
		return nil
	}
	child := newClique(k.size)
	for i, rank := range slices.Sorted(maps.Keys(k.asked)) {
		*k.asked[rank] = l.join(child, i, m.of.members[rank].device).handle
	}
	return nil
}

func (l *library) Finalize(c nccl.Comm) error {
	device := l.d.Current()
	l.mu.Lock()
	defer l.mu.Unlock()
	m, err := l.ready("ncclCommFinalize", c, device)
	if err == nil {
		m.final = true
		for _, b := range m.work {
			if !b.left.Load() {
				l.fault("ncclCommFinalize: rank %d still runs %s", m.rank, b)
			}
		}
	}
	return err
}

func (l *library) Destroy(c nccl.Comm) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	m, err := l.find("ncclCommDestroy", c)
	if err != nil {
		return err
	}
	if !m.final {
		l.fault("ncclCommDestroy: rank %d has not finalized the communicator", m.rank)
	}
	delete(l.comms, c)
	return nil
}

func (l *library) Abort(c nccl.Comm) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls["ncclCommAbort"]++
	m := l.comms[c]
	if m == nil {
		return l.wrong("ncclCommAbort", "a communicator that does not exist (%d)", c)
	}
	for _, b := range m.work {
		b.dead.Store(true)
		b.came.Store(true)
		b.left.Store(true)
	}
	delete(l.comms, c)
	return nil
}

func (l *library) GroupStart() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.enter("ncclGroupStart"); err != nil {
		return err
	}
	tid := unix.Gettid()
	if l.open[tid] == nil {
		l.open[tid] = &group{}
	}
	l.open[tid].depth++
	return nil
}

// Found returns the faults found so far and removes them, so that Close does not report them again.
func (f *Fabric) Found() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	err := errors.Join(f.faults...)
	f.faults = nil
	return err
}
