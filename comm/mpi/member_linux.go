package mpi

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/direct"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/comm/world"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
)

// Tags of messages. The groups' tags follow, four for each slot.
const (
	tagBeat = iota + 1
	tagStream
	tagJoin
	tagGroups
)

const (
	tagHeader = iota
	tagBytes
	tagPairHeader
	tagPairBytes
	tagsOfGroup
)

// member is one rank in a group. An operation has two exchanges or more:
//
//	meet   each pair exchanges headers, which describe the operation. A header that
//	       differs fails the operation before any of its bytes move; short messages
//	       move with the headers, into scratch (see moveShort)
//	move   bytes, a bounded part of a sum at a time (see sum), by MPI's collectives if
//	       the group has a communicator, else by messages
//
// MPI does not access the memory of a completed message: when the operation returns, no
// rank reads its inputs any more.
type member struct {
	world.Member
	world   *World
	calls   uint64
	group   uintptr // the group's MPI communicator; 0: the ranks send messages
	headers []byte  // outside the Go heap: the own header, then the peers' by index
	scratch []byte  // outside the Go heap: two chunks from each rank
}

var _ comm.Group = (*member)(nil)

// tag returns the tag of a message of the group. It encodes the kind of message and, since
// processes may have several ranks, the sending and the receiving rank.
func (m *member) tag(kind, from, to int) int {
	each := m.world.each
	return tagGroups + ((m.Slot*tagsOfGroup+kind)*each+from%each)*each + to%each
}

// to returns a message from this rank to another rank; from returns one in the other
// direction.
func (m *member) to(rank, kind int, mem []byte) transfer {
	return transfer{send: true, peer: rank / m.world.each, tag: m.tag(kind, m.World, rank), mem: mem}
}

func (m *member) from(rank, kind int, mem []byte) transfer {
	return transfer{peer: rank / m.world.each, tag: m.tag(kind, rank, m.World), mem: mem}
}

// kernel is one bound operation of one rank.
type kernel struct {
	comm.Call
	m     *member
	own   device.Ptr
	in    []byte
	out   []byte
	adder *direct.Adder
	text  string
	ranks []int // the ranks that take part, by index
	at    int   // this rank among them
	with  []int // for a round: the indices of the ranks that this rank exchanges headers with
	list  []transfer
	srcs  [][]byte
	short bool // the operation's bytes travel with its headers
}

var _ cpu.PeerKernel = (*kernel)(nil)

func (k *kernel) ReachesPeers() {}

func (m *member) bind(c comm.Call) (device.Kernel, error) {
	k := &kernel{Call: c, m: m, text: fmt.Sprintf("%s %q", c.Sig.Op, c.Name), ranks: m.Global, at: m.Index}
	if c.Sig.Op == comm.SendRecv {
		k.ranks, k.at = []int{m.Global[c.Peer], m.World}, 1
	}
	for _, x := range []struct {
		p   device.Ptr
		mem *[]byte
	}{{c.In, &k.in}, {c.Out, &k.out}} {
		if x.p.Arena == nil {
			continue
		}
		b, err := cpu.Bytes(x.p)
		if err != nil {
			return nil, err
		}
		*x.mem, k.own = b, x.p
	}
	if c.Round != nil {
		k.with = partners(c.Round, m.Index)
	}
	if c.Sig.Op == comm.ReduceScatter || c.Sig.Op == comm.AllReduce {
		var err error
		if k.adder, err = direct.NewAdder(c.Sig.DType, c.Sig.Order, m.Ranks); err != nil {
			return nil, err
		}
		if err := k.adder.Square(c.Squares); err != nil {
			return nil, err
		}
		size := c.Sig.DType.Size()
		for _, p := range c.Touches() {
			if p.Off%size != 0 {
				return nil, fmt.Errorf("byte %d is not a multiple of the %d of an element", p.Off, size)
			}
		}
	}
	k.srcs = make([][]byte, len(k.ranks))
	k.short = k.isShort()
	return k, nil
}

// Run runs the operation. It returns when no peer reads the rank's inputs any more.
func (k *kernel) Run() error {
	m, w := k.m, k.m.world
	if err := m.Enter(k.Call); err != nil {
		return err
	}
	defer m.Leave()
	if err := w.Err(); err != nil {
		return err
	}
	point := k.Sig.Op == comm.SendRecv
	if !point {
		m.calls++
	}
	w.show(k, watch.Waiting)
	record := &w.flights[m.World-w.first]
	entry := record.begin(k.text, m.calls, k.Sig.Bytes)
	if err := w.awaitGroups(); err != nil {
		return err
	}
	read, written, err := k.meetAndMove()
	if err != nil {
		return err
	}
	w.show(k, watch.Idle)
	record.end(entry)
	sent := k.Sent
	if point && !k.Sends() {
		sent = 0
	}
	m.Add(sent, read, written)
	return nil
}

// headerBytes is the length of a header: call, operation, dtype, bytes, root,
// flags, each of 8 bytes.
const headerBytes = 48

func (k *kernel) writeHeader(b []byte) {
	flags := uint64(0)
	if k.Sig.Accumulate {
		flags = 1
	}
	flags |= uint64(k.Sig.Order) << 1
	call := k.m.calls
	if k.Sig.Op == comm.SendRecv {
		call = 0
	}
	for i, v := range []uint64{call, world.OpNumber(k.Sig.Op), uint64(k.Sig.DType), uint64(k.Sig.Bytes), uint64(k.Sig.Root) | uint64(roundMark(k.Sig.Round))<<32, flags} {
		binary.LittleEndian.PutUint64(b[8*i:], v)
	}
}

func readHeader(b []byte) (call uint64, s comm.Signature) {
	v := func(i int) uint64 { return binary.LittleEndian.Uint64(b[8*i:]) }
	return v(0), comm.Signature{Op: world.OpOf(v(1)), DType: graph.DType(v(2)), Bytes: int64(v(3)), Root: int(uint32(v(4))), Order: graph.SumOrder(v(5) >> 1), Accumulate: v(5)&1 != 0}
}

// meetAndMove runs the operation once every rank has come with the same one. A short
// operation's bytes travel with the headers, and are used only after the headers agree.
func (k *kernel) meetAndMove() (read, written int64, err error) {
	w := k.m.world
	k.list = k.list[:0]
	k.addHeaders()
	if k.short {
		return k.moveShort()
	}
	if err := w.run(&exchange{list: slices.Clone(k.list)}); err != nil {
		return 0, 0, w.failed(k, err)
	}
	if i := k.differs(); i >= 0 {
		return 0, 0, k.mismatch(i)
	}
	w.show(k, watch.Moving)
	if read, written, err = k.move(); err != nil {
		return 0, 0, w.failed(k, err)
	}
	return read, written, nil
}

func (k *kernel) ownHeader() []byte { return k.m.headers[:headerBytes] }

func (k *kernel) header(i int) []byte { return k.m.headers[(i+1)*headerBytes : (i+2)*headerBytes] }

// addHeaders adds the headers to and from every other rank of the operation.
func (k *kernel) addHeaders() {
	kind := tagHeader
	if k.Sig.Op == comm.SendRecv {
		kind = tagPairHeader
	}
	k.writeHeader(k.ownHeader())
	for i, r := range k.ranks {
		if k.meets(i) {
			k.list = append(k.list, k.m.from(r, kind, k.header(i)), k.m.to(r, kind, k.ownHeader()))
		}
	}
}

// differs returns the index of the first rank whose header differs from this rank's; −1: none.
func (k *kernel) differs() int {
	for i := range k.ranks {
		if k.meets(i) && string(k.header(i)) != string(k.ownHeader()) {
			return i
		}
	}
	return -1
}

// mismatch fails the job with an error that names rank index i, whose header differs.
func (k *kernel) mismatch(i int) error {
	m := k.m
	call, sig := readHeader(k.header(i))
	return m.world.fail(fmt.Errorf("%w in the %s group: rank %d runs %s (%q, call %d), rank %d runs %s (call %d)", comm.ErrMismatch, m.Name,
		m.World, k.Sig, k.Name, m.calls, k.ranks[i], sig, call))
}

// meets tells whether the rank exchanges headers with the rank of index i.
func (k *kernel) meets(i int) bool {
	return i != k.at && (k.Round == nil || slices.Contains(k.with, i))
}

// all runs an exchange with every other rank. recv and send return the memory of the message
// from, or to, index i; nil means no message.
func (k *kernel) all(recv, send func(i int) []byte) error {
	k.list = k.list[:0]
	k.addAll(recv, send)
	return k.m.world.exchange(k.list)
}

func (k *kernel) addAll(recv, send func(i int) []byte) {
	for j := 1; j < len(k.ranks); j++ {
		i := (k.at + j) % len(k.ranks) // each rank starts at a different peer, to spread the load
		if b := recv(i); len(b) > 0 {
			k.list = append(k.list, k.m.from(k.ranks[i], tagBytes, b))
		}
	}
	for j := 1; j < len(k.ranks); j++ {
		i := (k.at + len(k.ranks) - j) % len(k.ranks)
		if b := send(i); len(b) > 0 {
			k.list = append(k.list, k.m.to(k.ranks[i], tagBytes, b))
		}
	}
}

func none(int) []byte { return nil }

// move moves the bytes of the operation, and returns what the rank loaded and
// stored of its own memory.
func (k *kernel) move() (read, written int64, err error) {
	if k.Round != nil {
		return k.moveRound()
	}
	w, self := len(k.ranks), k.at
	collective := k.m.group != 0 && w > 1
	part := func(b []byte, i int) []byte { n := len(b) / w; return b[i*n : (i+1)*n] }
	switch k.Sig.Op {
	case comm.AllGather:
		switch {
		case collective && k.InPlace:
			err = k.everyPart(comm.AllGather, nil, k.out)
		case collective:
			err = k.everyPart(comm.AllGather, k.in, k.out)
		default:
			if !k.InPlace {
				copy(part(k.out, self), k.in)
			}
			err = k.all(func(i int) []byte { return part(k.out, i) }, func(int) []byte { return k.in })
		}
		return int64(len(k.in) * (w - 1)), int64(len(k.in) * (w - 1)), err
	case comm.Broadcast:
		recv, send := none, none
		if self == k.Sig.Root {
			send = func(int) []byte { return k.out }
		} else {
			recv = func(i int) []byte {
				if i != k.Sig.Root {
					return nil
				}
				return k.out
			}
		}
		return 0, int64(len(k.out)), k.all(recv, send)
	case comm.AllToAll:
		if collective {
			return int64(len(k.in)), int64(len(k.out)), k.everyPart(comm.AllToAll, k.in, k.out)
		}
		copy(part(k.out, self), part(k.in, self))
		err = k.all(func(i int) []byte { return part(k.out, i) }, func(i int) []byte { return part(k.in, i) })
		return int64(len(k.in)), int64(len(k.out)), err
	case comm.ReduceScatter:
		if w == 1 && k.InPlace {
			return 0, 0, nil
		}
		own := part(k.in, self)
		n := int64(len(own))
		move := k.chunkMessages(own, func(i int) []byte { return part(k.in, i) })
		if collective && w <= maxLandings {
			move = func(c int64) *exchange {
				send, sends, of := k.scatterSends(k.in, n, c)
				return k.scatterChunk(send, sends, of, k.landing(0, c), int64(len(chunk(own, c))))
			}
		}
		err = k.sum(k.out, own, k.Sig.Accumulate, n, move)
		return int64(len(k.in)), int64(len(k.out)), err
	case comm.AllReduce:
		return k.allReduce()
	case comm.SendRecv:
		t := k.m.from(k.ranks[0], tagPairBytes, k.out)
		if k.Sends() {
			t = k.m.to(k.ranks[0], tagPairBytes, k.in)
			t.sync = true
		}
		k.list = append(k.list[:0], t)
		return int64(len(k.in)), int64(len(k.out)), k.m.world.exchange(k.list)
	}
	return 0, 0, nil // a barrier
}

// shortBytes is the longest message that travels with the headers. A rank sends at most
// twice that in total with the headers of one operation. MPI libraries buffer messages of this
// size for receivers that have not arrived yet. Tests reduce it.
var shortBytes = 64 << 10

// isShort tells whether every message of the operation is short. It depends only on the
// signature, so that ranks with equal signatures decide alike.
func (k *kernel) isShort() bool {
	w, n := len(k.ranks), 0
	switch k.Sig.Op {
	case comm.AllGather:
		n = len(k.in)
	case comm.AllToAll, comm.ReduceScatter:
		n = len(k.in) / w
	case comm.AllReduce:
		n = len(k.out)
	}
	return k.Round == nil && n > 0 && w > 1 && n <= shortBytes && n*(w-1) <= 2*shortBytes
}

// moveShort runs a short operation as one exchange, together with its headers. Addends go
// directly to every rank that adds them. All messages use scratch memory instead of the rank's
// arena: they are posted before the ranks have agreed, and if the job ends meanwhile, the arena
// may be freed while MPI still accesses pending messages.
func (k *kernel) moveShort() (read, written int64, err error) {
	w, self := len(k.ranks), k.at
	part := func(b []byte, i int) []byte { n := len(b) / w; return b[i*n : (i+1)*n] }
	from := k.in // the source of the message to index i
	give := func(i int) []byte { return part(k.in, i) }
	read, written = int64(len(k.in)), int64(len(k.out))
	switch k.Sig.Op {
	case comm.AllGather:
		give = func(int) []byte { return from }
		read *= int64(w - 1)
		written = read
	case comm.AllReduce:
		from = k.out
		give = func(int) []byte { return from }
		read = written
	}
	recv := func(i int) []byte { return k.landing(i, 0)[:len(give(i))] }
	send := func(i int) []byte { return k.landing(i, 1)[:len(give(i))] }
	for i := range w {
		copy(send(i), give(i))
	}
	first := len(k.list)
	k.addAll(recv, send)
	err = k.m.world.run(&exchange{list: k.list, first: first, check: func() bool {
		k.m.world.show(k, watch.Moving)
		return k.differs() < 0
	}})
	switch {
	case errors.Is(err, errRefused):
		return 0, 0, k.mismatch(k.differs())
	case err != nil:
		return 0, 0, k.m.world.failed(k, err)
	}
	for i := range w {
		k.srcs[i] = recv(i)
	}
	k.srcs[self] = give(self)
	if k.adder != nil {
		k.adder.Sum(k.out, comm.Addends(&k.Call, k.srcs), k.Sig.Accumulate)
		return read, written, nil
	}
	for i, b := range k.srcs {
		if i != self || k.Sig.Op == comm.AllToAll || !k.InPlace {
			copy(part(k.out, i), b)
		}
	}
	return read, written, nil
}

// smallBytes is the largest buffer for which an all-reduce sends every buffer to all ranks.
// Each rank then adds them all in the same order: one exchange instead of two.
const smallBytes = 8 << 10

// allReduce sums the rank's share of the buffer over the ranks and sends the sum to all
// ranks.
func (k *kernel) allReduce() (read, written int64, err error) {
	w, n := len(k.ranks), int64(len(k.out))
	collective := k.m.group != 0 && w <= maxLandings
	switch {
	case w == 1:
		return 0, 0, nil
	case n <= smallBytes:
		return n, n, k.smallReduce(collective)
	case !collective:
		return n, n, k.reduceShares(k.out, false)
	}
	segment := maxCount / 64 * 64 // limit of counts and displacements
	for at := int64(0); at < n; at += segment {
		if err := k.reduceShares(k.out[at:min(n, at+segment)], true); err != nil {
			return 0, 0, err
		}
	}
	return n, n, nil
}

// smallReduce is an all-reduce in which every rank receives all buffers and adds them.
func (k *kernel) smallReduce(collective bool) error {
	var err error
	if collective {
		err = k.gatherAll(k.out)
	} else {
		for i := range k.srcs {
			k.srcs[i] = k.m.scratch[i*chunkBytes:][:len(k.out)]
		}
		copy(k.srcs[k.at], k.out)
		err = k.all(func(i int) []byte { return k.srcs[i] }, func(int) []byte { return k.out })
	}
	if err == nil {
		k.adder.Sum(k.out, k.srcs, false)
	}
	return err
}

// reduceShares sums the rank's share of a buffer over the ranks and sends it to all ranks.
func (k *kernel) reduceShares(buf []byte, collective bool) error {
	w, n, size := len(k.ranks), int64(len(buf)), k.Sig.DType.Size()
	share := func(i int) []byte {
		from, to := comm.Share(n/size, int64(i), int64(w))
		return buf[from*size : to*size]
	}
	longest := int64(0)
	for i := range w {
		longest = max(longest, int64(len(share(i))))
	}
	own := share(k.at)
	move := k.chunkMessages(own, share)
	if collective {
		move = func(c int64) *exchange {
			return k.scatterChunk(buf, k.shareSends(n, size, c), block{}, k.landing(0, c), int64(len(chunk(own, c))))
		}
	}
	if err := k.sum(own, own, false, longest, move); err != nil {
		return err
	}
	if !collective {
		return k.all(share, func(int) []byte { return own })
	}
	parts := newCounts(w)
	for i := range w {
		from, _ := comm.Share(n/size, int64(i), int64(w))
		parts.n[i], parts.at[i] = int32(len(share(i))), int32(from*size)
	}
	return k.collect(n, gatherParts(k.m.group, buf, parts))
}

// chunkBytes is the size of the chunks in which a sum receives each rank's part. The sum
// needs scratch memory of two chunks for each rank.
const chunkBytes = comm.ChunkBytes

// maxLandings is the largest number of ranks whose chunks MPI's 32-bit displacements can
// address.
const maxLandings = math.MaxInt32/chunkBytes + 1

// chunk returns the part of b that moves in chunk c of a sum.
func chunk(b []byte, c int64) []byte {
	n := int64(len(b))
	return b[min(n, c*chunkBytes):min(n, (c+1)*chunkBytes)]
}

// landing returns the scratch memory from the place that receives chunk c of index i on.
func (k *kernel) landing(i int, c int64) []byte {
	half := (c % 2) * int64(len(k.ranks))
	return k.m.scratch[(half+int64(i))*chunkBytes:]
}

// chunkMessages returns a function that makes the messages of chunk c of a sum. part(i) is
// this rank's addend for the part of index i. own is this rank's own part; every other rank
// sends an addend of the same length for it.
func (k *kernel) chunkMessages(own []byte, part func(i int) []byte) func(c int64) *exchange {
	m := k.m
	return func(c int64) *exchange {
		list := make([]transfer, 0, 2*len(k.ranks))
		for j := 1; j < len(k.ranks); j++ {
			i := (k.at + j) % len(k.ranks)
			if n := len(chunk(own, c)); n > 0 {
				list = append(list, m.from(k.ranks[i], tagBytes, k.landing(i, c)[:n]))
			}
			if b := chunk(part(i), c); len(b) > 0 {
				list = append(list, m.to(k.ranks[i], tagBytes, b))
			}
		}
		return &exchange{list: list, met: true}
	}
}

// sum adds the ranks' addends for this rank's part into dst, which is own or does not overlap
// it. own is this rank's addend, longest the length of the longest part of any rank, and move
// makes the exchange of a chunk. While one chunk is added the next one is in transit. dst has
// as many elements as own; in a sequential sum they are f32.
func (k *kernel) sum(dst, own []byte, accumulate bool, longest int64, move func(c int64) *exchange) error {
	w := k.m.world
	chunks := (longest + chunkBytes - 1) / chunkBytes
	if chunks == 0 {
		return nil
	}
	wait := func() error { return w.run(move(0)) } // the first chunk: nothing to add meanwhile
	for c := range chunks {
		if err := wait(); err != nil {
			return err
		}
		if c+1 < chunks {
			next := w.engine.start(move(c + 1))
			wait = func() error { return w.wait(next) }
		}
		k.srcs[k.at] = chunk(own, c)
		n := len(k.srcs[k.at])
		for i := range k.srcs {
			if i != k.at {
				k.srcs[i] = k.landing(i, c)[:n]
			}
		}
		if n > 0 {
			wide := len(dst) / len(own) // 2 where 16 bits are added in f32
			at := int(c) * chunkBytes * wide
			k.adder.At(int(c)*chunkBytes/int(k.Sig.DType.Size()), dst[at:at+n*wide], comm.Addends(&k.Call, k.srcs), accumulate)
		}
	}
	return nil
}
