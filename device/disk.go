package device

// Disk is the storage behind one rank's arena in graph.Disk. Offsets and
// lengths are bytes and need no alignment; every range lies in the arena.
// Transfers are bound once and run many times, as kernels are.
type Disk interface {
	// Load binds a read of len(mem) bytes at off to mem.
	Load(mem []byte, off int64) Transfer
	// Store binds a write of mem to off.
	Store(mem []byte, off int64) Transfer
	// Fill binds a write of n bytes b at off.
	Fill(off, n int64, b byte) Transfer
	// Traffic returns what has been moved so far. It may be called at any time.
	Traffic() Traffic
	// Close gives the storage back. No transfer runs any more.
	Close() error
}

// Transfer is a bound movement of bytes. Run returns when they are there. It
// does not allocate, and one Transfer runs once at a time; different ones may
// run at the same time unless they conflict.
type Transfer interface{ Run() error }

// Traffic is a number of bytes that transfers asked for and the storage moved:
// without what rounding to its blocks adds, and without what a cache served.
type Traffic struct{ Read, Written int64 }

// DiskUser is a Context that can tell its disk traffic.
type DiskUser interface{ DiskTraffic() Traffic }
