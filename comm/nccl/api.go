package nccl

import (
	"fmt"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// Comm is NCCL's handle of one rank in a communicator. 0 means no communicator.
type Comm uintptr

// communicator is one rank's handle of a communicator, at an address that stays.
type communicator struct{ handle Comm }

// IDBytes is the length of an ID.
const IDBytes = 128

// ID identifies a communicator that its ranks are about to create (ncclUniqueId). One rank
// creates the ID and sends it to the others. If NCCL_COMM_ID is set in the environment, the ID
// holds that address.
type ID [IDBytes]byte

// OldestVersion is the oldest supported NCCL version, the first with ncclCommSplit: 2.18.
const OldestVersion = 2*10000 + 18*100

// ShrinkVersion is the first NCCL version with ncclCommShrink: 2.27.
const ShrinkVersion = 2*10000 + 27*100

// VersionText formats NCCL's version number: "2.21.5" for 22105.
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

// ByteType is the data type of every call: NCCL only moves bytes; Spillway adds.
const ByteType = unsignedBytes

// Error is a failed NCCL call, or an asynchronous error of a communicator.
type Error struct {
	Call string // "ncclCommInitRankConfig"
	Code int
	Text string // NCCL's description, and its last error if it has one
}

func (e *Error) Error() string { return fmt.Sprintf("%s: %s (%d)", e.Call, e.Text, e.Code) }

// Config holds the settings of a new communicator, which is always non-blocking.
type Config struct {
	CTAs  int  // largest number of thread blocks of its kernels; 0: NCCL chooses
	Share bool // communicators split from it share its buffers; their calls then need one common order
}

// API is NCCL. Its communicators do not block: a call that returned nil may still be in
// progress, and State tells when it is complete. Only one thread at a time may call functions
// of a communicator; the context of its GPU must be current there.
//
// Counts are bytes.
type API interface {
	Version() (int, error)
	// UniqueID creates the ID for a new communicator.
	UniqueID() (ID, error)
	// Init begins to create rank of a communicator of so many ranks; all of them call it.
	// NCCL writes the handle to into before State reports completion; the caller must keep
	// into valid until then.
	Init(into *Comm, ranks int, id ID, rank int, o Config) error
	// Split begins to create one communicator for each color, of the ranks of c that pass
	// that color, ordered by key; all ranks of c call it. State of c tells when into is
	// written.
	Split(c Comm, into *Comm, color, key int, o Config) error
	// Shrinks returns nil if the library supports Shrink, else an error that names the
	// version needed.
	Shrinks() error
	// Shrink begins to create a communicator of all ranks of c except those in without, a
	// non-empty ascending list. Exactly the remaining ranks call it, and they keep their
	// order. Shrink fails if c has an error or an operation in progress. The excluded ranks
	// may have died. State of c tells when into is written.
	Shrink(c Comm, without []int, into *Comm, o Config) error
	// State tells whether a call of c is in progress, or returns the error that ended c.
	State(c Comm) (busy bool, err error)
	// Finalize begins to finish c after all its operations have run; State tells when it is
	// done. Destroy then frees c.
	Finalize(c Comm) error
	Destroy(c Comm) error
	// Abort stops the operations of c and frees c. Any thread may call it, but not during
	// another call of c.
	Abort(c Comm) error

	// Calls between GroupStart and GroupEnd are collected and started together.
	GroupStart() error
	GroupEnd() error
	// AllGather copies bytes bytes of each rank's send, in rank order, to recv on all ranks.
	// send may be the rank's own part of recv.
	AllGather(send, recv driver.Address, bytes int64, c Comm, s driver.Stream) error
	Broadcast(buf driver.Address, bytes int64, root int, c Comm, s driver.Stream) error
	Send(buf driver.Address, bytes int64, to int, c Comm, s driver.Stream) error
	Recv(buf driver.Address, bytes int64, from int, c Comm, s driver.Stream) error
}

// at is the address off bytes after a.
func at(a driver.Address, off int64) driver.Address { return a + driver.Address(off) }
