package memplan

// Limits of the search, in pairs of buffers compared. Unlike time, counted work gives the same plan
// on every machine. The search ends when no extent can be lower, or when the extent exceeds the
// bound by at most one part in nearBound, and by another thousandth for every unitWork of work. It
// also ends at maxWork pairs, or at one pair for each byte of the bound: a small arena can save
// little.
const (
	nearBound     = 2000
	unitWork      = 20e6
	maxWork       = 150e6
	squeakyStarts = 5 // number of the best rankings that squeak uses, in turn
	squeakyRounds = 96
	// stopEvery is the number of buffers between two calls of stop, about a millisecond.
	stopEvery = 256
)

// fewBuffers is the largest number of buffers that runFew places. For this number, updating a
// placedGroup costs more than it saves: runFew searches a plain list of all placed buffers by
// offset.
const fewBuffers = 1 << 12

// fewLive is the largest number of live buffers for which, if rows exist, examining each is faster
// than examining pieces.
const fewLive = 8 * pieceSize

// pieceSize is the largest number of buffers in a piece.
const pieceSize = 64

// mostRows is the largest number of buffers for which rows are made, in 32 MiB, if some buffer has
// several ranges. Otherwise runMany uses no rows above fewBuffers: comparing lives is as fast.
const mostRows = 1 << 14
