package mpi

// OutsideBytes returns the memory in bytes that one of the given number of processes needs in
// addition to its ranks' arenas and scratch: for the MPI library, heartbeats and streams.
func OutsideBytes(processes, each int) int64 {
	return libraryBytes + int64(processes)*2*(beatBytes*int64(each)+pieceBytes)
}

// libraryBytes is the memory that Open MPI or MPICH uses in each of two processes. It was
// measured as the resident memory of a small training run beyond that of the same run over
// shared memory.
const libraryBytes = 10 << 20

const (
	beatBytes  = 4 << 10   // size of a heartbeat message for each rank that it reports on
	pieceBytes = 256 << 10 // the longest piece of a stream's message
)
