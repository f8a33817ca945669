package filesys

// Large files are written and read in blocks, several at once, past the page cache.

const (
	// Alignment of offsets, sizes and memory in direct I/O, bytes.
	Alignment = 4096
	// BlockBytes is the size of a block; Depth is the number of blocks in flight.
	BlockBytes = 1 << 20
	Depth      = 4
	// DirectBytes is the smallest size of a file that is written past the page cache; for smaller
	// files direct I/O costs more.
	DirectBytes = 4 << 20
)

// RoundUp rounds up to a multiple of Alignment.
func RoundUp(n int64) int64 { return (n + Alignment - 1) / Alignment * Alignment }
