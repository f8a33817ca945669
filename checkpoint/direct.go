package checkpoint

// Ranks' files are written and read in blocks, several at once, and large ones past the page
// cache.

const (
	// alignment of the data, of writes and of their memory in direct I/O, bytes.
	alignment = 4096
	// blockBytes is the size of a write buffer; depth is how many are in flight.
	blockBytes = 1 << 20
	depth      = 4
)

// directBytes is the size from which a file is written past the page cache; for smaller files
// that costs more.
const directBytes = 4 << 20

func roundUp(n int64) int64 { return (n + alignment - 1) / alignment * alignment }
