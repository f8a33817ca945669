package filesys

// Large files are written and read in blocks, several at once, past the page cache.

const (
	// Alignment of offsets, sizes and memory in direct I/O, bytes.
	Alignment = 4096
	// BlockBytes is the size of a block; Depth is how many are in flight.
	BlockBytes = 1 << 20
	Depth      = 4
	// DirectBytes is the size from which a file is written past the page cache; for smaller files
	// that costs more.
	DirectBytes = 4 << 20
)

// RoundUp rounds up to a multiple of Alignment.
func RoundUp(n int64) int64 { return (n + Alignment - 1) / Alignment * Alignment }
