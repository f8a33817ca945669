// Package relay protects a rank from the SIGKILL that MPICH's launcher sends.
//
// Hydra's proxy signals the process group of each process that it started. At a second SIGINT
// mpiexec closes its connections to the proxies. Each proxy then sends SIGKILL to these groups and
// ends; it does the same when mpiexec itself is gone. A rank that is about to save would lose its
// last steps. So the process that the proxy starts is a relay: it starts the program again, as the
// rank, in a separate process group.
//
//	mpiexec ── proxy ── relay (killed by the proxy) ── rank (saves, then ends)
//
// The rank inherits everything else from the relay: environment, open files, processors, session.
package relay

import "time"

// Variable is the environment variable by which a relay tells its rank the relay's process number.
const Variable = "SPILLWAY_RELAY"

// Bytes is the memory of a relay, beyond the memory that it shares with its rank.
const Bytes = 4 << 20

const (
	lookEvery = 50 * time.Millisecond
	// ending is the longest time between a proxy's SIGKILL to the groups and its own end.
	ending = time.Second
)

// needs are the environment variables that hydra gives each process; srun does not give all of
// them. The first is the number of the file through which a process talks to the proxy.
var needs = []string{"PMI_FD", "PMI_RANK", "MPI_LOCALNRANKS"}
