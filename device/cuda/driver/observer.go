package driver

// Range is bytes of memory that a kernel reaches.
type Range struct {
	At  Address
	Len int64 // bytes
}

// Observer is a driver that checks what orders conflicting accesses: the double
// of the tests. A launch's packed parameters don't say what it reads and writes,
// and the driver does not see what the host does: both are told.
//
// An agent is a host thread or goroutine of the caller's choice; agents and words
// need no registration.
type Observer interface {
	// Access tells what the work enqueued next on s reads and writes.
	Access(label string, s Stream, reads, writes []Range)
	// HostAccess tells what an agent is about to read and write.
	HostAccess(agent uintptr, label string, reads, writes []Range)
	// HostSaw tells that an agent has seen in a word what WriteValue stored.
	HostSaw(agent uintptr, word Address)
	// HostSet tells that an agent is about to store to a word that streams wait for.
	HostSet(agent uintptr, word Address)
	// Abandon tells that waits are about to be released by an abort, so that
	// nothing is ordered any more.
	Abandon()
}
