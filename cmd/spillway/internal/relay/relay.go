// Package relay keeps a rank out of the reach of the SIGKILL that MPICH's launcher sends.
//
// Hydra's proxy signals the process group of each process that it has started. At a second
// SIGINT mpiexec closes its connections to the proxies; each then sends SIGKILL to these groups
// and ends, and so it does when mpiexec itself is gone. A rank that is about to save would lose
// its last steps. So the process that the proxy starts is a relay: it starts the program once
// more, as the rank, in a process group of its own.
//
//	mpiexec ── proxy ── relay (killed by the proxy) ── rank (saves and ends by itself)
//
// The rank has everything else from the relay: environment, open files, processors, session.
package relay

import "time"

// Variable is what a relay tells its rank by: the number of its own process.
const Variable = "SPILLWAY_RELAY"

// Bytes is what a relay takes of memory beyond what it shares with its rank.
const Bytes = 4 << 20

const (
	lookEvery = 50 * time.Millisecond
	// ending is how much later than the SIGKILL that it sends a proxy may end itself.
	ending = time.Second
)

// needs are the variables that hydra gives each process, and srun does not give all of: the
// number of the file by which a process talks to the proxy is the first.
var needs = []string{"PMI_FD", "PMI_RANK", "MPI_LOCALNRANKS"}
