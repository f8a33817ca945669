package memplan

// Limits of the search, in pairs of buffers compared: counted work, unlike time, gives the same
// plan on every machine. The search is over when no extent can be lower, or when it exceeds the
// bound by at most one part in nearBound, and for every unitWork of work by a thousandth more; maxWork ends it
// in any case, and one pair for each byte of the bound: in a small arena there is little to save.
const (
	nearBound     = 2000
	unitWork      = 20e6
	maxWork       = 150e6
	squeakyStarts = 5 // how many of the best rankings squeak uses, in turn
	squeakyRounds = 96
	// stopEvery is the number of buffers between two calls of stop, about a millisecond.
	stopEvery = 256
)

// fewBuffers is the largest number of buffers that are placed by runFew. For so few, keeping a
// placedGroup up to date costs more than it saves: runFew searches a plain list of all placed
// buffers by offset.
const fewBuffers = 1 << 12

// fewLive is the number of live buffers up to which, if rows exist, looking at each is faster
// than going by pieces.
const fewLive = 8 * pieceSize

// pieceSize is the largest number of buffers in a piece.
const pieceSize = 64

// mostRows is the largest number of buffers for which rows are made, in 32 MiB, if some buffer has
// several ranges. Otherwise runMany does without: comparing lives is as fast.
const mostRows = 1 << 14
