package mpi

import (
	"fmt"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/direct"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/comm/world"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
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

// chunkBytes is the size of the chunks in which a sum receives each rank's part. The sum
// needs scratch memory of two chunks for each rank.
const chunkBytes = comm.ChunkBytes

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

// failed makes an error of an operation's messages the job's error.
func (w *World) failed(k *kernel, err error) error {
	if job := w.Err(); job != nil {
		return job
	}
	return w.fail(fmt.Errorf("%w: rank %d: %s: %w", comm.ErrLost, k.m.World, k.text, err))
}

// show puts the rank's progress in an operation into the heartbeat.
func (w *World) show(k *kernel, phase watch.Phase) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := watch.Progress{Call: k.m.calls, Phase: phase, Op: k.text}
	own := &w.own.Reports[k.m.World-w.first]
	if k.Sig.Op == comm.SendRecv {
		own.Point, own.Peer = p, k.ranks[0]
		return
	}
	own.In[k.m.Slot] = p
}
