package nccl

import (
	"fmt"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// Comm is the library's handle of one rank in a communicator. 0 is none.
type Comm uintptr

// IDBytes is the length of an ID.
const IDBytes = 128

// ID is what the ranks of a communicator find each other by. One rank makes it and the
// others get it from that one. With NCCL_COMM_ID in the environment it holds that address.
type ID [IDBytes]byte

// OldestVersion is of the first library with ncclCommSplit: 2.18.
const OldestVersion = 2*10000 + 18*100

// ShrinkVersion is of the first library with ncclCommShrink: 2.27.
const ShrinkVersion = 2*10000 + 27*100

// VersionText is "2.21.5" of 22105.
func VersionText(v int) string { return fmt.Sprintf("%d.%d.%d", v/10000, v/100%100, v%100) }

// Results of the library, as nccl.h numbers them.
const (
	Success       = 0
	systemError   = 2
	InvalidUsage  = 5
	RemoteError   = 6
	InProgress    = 7
	unsignedBytes = 1 // ncclUint8
)

// ByteType is the data type of every call: the library moves bytes and adds nothing.
const ByteType = unsignedBytes

// Error is a call of NCCL that failed, or what it found later.
type Error struct {
	Call string // "ncclCommInitRankConfig"
	Code int
	Text string // the library's own description, and its last error where it has one
}

func (e *Error) Error() string { return fmt.Sprintf("%s: %s (%d)", e.Call, e.Text, e.Code) }

// Config is what a communicator is made with; it never blocks.
type Config struct {
	CTAs  int  // thread blocks of its kernels, at most; 0: the library's choice
	Share bool // those that are split from it have no buffers of their own; calls of all are then in one order
}

// API is the library. Its communicators do not block: a call that returns nil may be under
// way still, and State tells when it is not any more. The calls of a communicator come from
// one thread at a time, whose current context is that of its GPU.
//
// Counts are bytes.
type API interface {
	Version() (int, error)
	// UniqueID makes what a communicator is initialised with.
	UniqueID() (ID, error)
	// Init begins to make rank of so many ranks; all of them call it. The handle is
	// written to into before State says that it is done, which the caller keeps until then.
	Init(into *Comm, ranks int, id ID, rank int, o Config) error
	// Split begins to make communicators of those ranks of c that give the same color, in
	// the order of key; all ranks of c call it. State of c tells when into is written.
	Split(c Comm, into *Comm, color, key int, o Config) error
	// Shrinks is nil where the library has Shrink, else it says what is wanted.
	Shrinks() error
	// Shrink begins to make a communicator of the ranks of c but for those that are without,
	// in ascending order, at least one: each that stays calls it, nobody else, and they
	// keep their order. c has nothing under way and no error, or Shrink fails; who is
	// without need not be there any more. State of c tells when into is written.
	Shrink(c Comm, without []int, into *Comm, o Config) error
	// State tells whether a call is under way, or the error that has ended c.
	State(c Comm) (busy bool, err error)
	// Finalize begins to bring c to its end, once all of it has run; State tells when it
	// has. Destroy then gives it back.
	Finalize(c Comm) error
	Destroy(c Comm) error
	// Abort ends what c runs and gives it back. Any thread may call it while no other call
	// of c is made.
	Abort(c Comm) error

	// Between GroupStart and GroupEnd calls are collected, to begin together.
	GroupStart() error
	GroupEnd() error
	// AllGather copies so many bytes of each rank's send, by rank, to everybody's recv.
	// send may be the rank's own part of recv.
	AllGather(send, recv driver.Address, bytes int64, c Comm, s driver.Stream) error
	Broadcast(buf driver.Address, bytes int64, root int, c Comm, s driver.Stream) error
	Send(buf driver.Address, bytes int64, to int, c Comm, s driver.Stream) error
	Recv(buf driver.Address, bytes int64, from int, c Comm, s driver.Stream) error
}
