package driver

// Range is a range of memory that a kernel accesses.
type Range struct {
	At  Address
	Len int64 // bytes
}

// Observer is a driver that checks that conflicting memory accesses are ordered; the test double
// implements it. The caller must report accesses: packed parameters do not show a launch's reads
// and writes, and the driver does not see accesses of the host.
//
// An agent is a host thread or goroutine of the caller's choice; agents and words
// need no registration.
type Observer interface {
	// Access reports the reads and writes of the work enqueued next on s.
	Access(label string, s Stream, reads, writes []Range)
	// HostAccess reports the reads and writes that an agent will do next.
	HostAccess(agent uintptr, label string, reads, writes []Range)
	// HostSaw reports that an agent has read from a word the value that WriteValue stored.
	HostSaw(agent uintptr, word Address)
	// HostSet reports that an agent is about to store to a word that streams wait for.
	HostSet(agent uintptr, word Address)
	// Abandon reports that an abort is about to release all waits: from then on accesses
	// are no longer ordered and must not be checked.
	Abandon()
}
