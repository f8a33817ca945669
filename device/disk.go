package device

// Disk is the storage of one rank's arena in graph.Disk. Offsets and lengths are in bytes and need
// no alignment; every range must be inside the arena. Like kernels, transfers are bound once and
// run many times.
type Disk interface {
	// Load binds a read of len(mem) bytes at off to mem.
	Load(mem []byte, off int64) Transfer
	// Store binds a write of mem to off.
	Store(mem []byte, off int64) Transfer
	// Fill binds a write of n bytes b at off.
	Fill(off, n int64, b byte) Transfer
	// Traffic returns the bytes moved so far. It may be called at any time.
	Traffic() Traffic
	// Close releases the storage. No transfer may still be running.
	Close() error
}

// Transfer is a bound movement of bytes between memory and disk. Run returns when it is
// complete and does not allocate. A Transfer must not run twice at the same time; different
// Transfers may, unless their ranges conflict.
type Transfer interface{ Run() error }

// Traffic counts the bytes that transfers requested and the storage moved. It excludes bytes
// added by rounding to the storage's blocks, and bytes served from a cache.
type Traffic struct{ Read, Written int64 }

// DiskUser is a Context that can report its disk traffic.
type DiskUser interface{ DiskTraffic() Traffic }
