// Package cluster reads from environment variables which rank of a job a process is. They are set
// by mpirun, Slurm, torchrun, a Kubernetes indexed Job or spillway launch. It has no side effects:
// it only reads the variables that it is given.
package cluster

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Source names the launcher of the process.
type Source string

// Sources, in the order tried. Launchers that start the processes themselves precede those whose
// variables a process may inherit.
const (
	Alone      Source = ""
	Launch     Source = "spillway launch"
	OpenMPI    Source = "Open MPI's mpirun"
	PMI        Source = "a PMI launcher (MPICH's mpirun, srun with pmi2)"
	PMIx       Source = "a PMIx launcher (srun with pmix, prterun)"
	Slurm      Source = "srun"
	Torchrun   Source = "torchrun"
	Kubernetes Source = "a Kubernetes indexed Job"
)

// Variables that spillway launch sets for each process.
const (
	LaunchRank  = "SPILLWAY_RANK"
	LaunchWorld = "SPILLWAY_WORLD_SIZE"
	// LaunchThreads is the number of computing threads of each process.
	LaunchThreads = "SPILLWAY_THREADS"
)

// NCCLRoot is NCCL's own variable for the address of its rank 0.
const NCCLRoot = "NCCL_COMM_ID"

// Env is a process's place in its job.
type Env struct {
	Source Source
	Rank   int
	World  int // processes of the job; 1 if this is the only one
	// LocalRank and LocalWorld are this process's number and the number of processes on its
	// host; LocalWorld is 0 if unknown.
	LocalRank, LocalWorld int
	// NCCLRoot is NCCL_COMM_ID: where NCCL's rank 0 listens, HOST:PORT; "" if not set.
	NCCLRoot string
	Threads  int // computing threads of this process, from spillway launch; 0 if not set
}

// form describes the variables that one source sets.
type form struct {
	source                Source
	rank, world           []string // the first that is set is used
	localRank, localWorld []string
	needs                 []string // all must be set; otherwise the source is not used
	worldMissing          string   // error text if the world's size is not set; "" if needs covers it
	localIsList           bool     // localWorld is Slurm's list: "2(x3),1"
}

var forms = []form{
	{source: Launch, rank: []string{LaunchRank}, world: []string{LaunchWorld}, worldMissing: "it is set by spillway launch"},
	{source: OpenMPI, rank: []string{"OMPI_COMM_WORLD_RANK"}, world: []string{"OMPI_COMM_WORLD_SIZE"},
		localRank: []string{"OMPI_COMM_WORLD_LOCAL_RANK"}, localWorld: []string{"OMPI_COMM_WORLD_LOCAL_SIZE"}, worldMissing: "mpirun sets both"},
	{source: PMI, rank: []string{"PMI_RANK"}, world: []string{"PMI_SIZE"},
		localRank: []string{"MPI_LOCALRANKID", "SLURM_LOCALID"}, localWorld: []string{"MPI_LOCALNRANKS"}, worldMissing: "the launcher sets both"},
	{source: PMIx, rank: []string{"PMIX_RANK"}, needs: []string{"PMIX_NAMESPACE"}, world: []string{"SLURM_STEP_NUM_TASKS", "PRTE_NUM_PROCS"},
		localRank: []string{"SLURM_LOCALID"}, worldMissing: "PMIx itself does not say it; start with mpirun or srun"},
	// SLURM_PROCID alone is also set in a batch script, which is not a task of the job: only
	// srun's tasks have a step.
	{source: Slurm, rank: []string{"SLURM_PROCID"}, needs: []string{"SLURM_STEP_NUM_TASKS"}, world: []string{"SLURM_STEP_NUM_TASKS"},
		localRank: []string{"SLURM_LOCALID"}, localWorld: []string{"SLURM_STEP_TASKS_PER_NODE"}, localIsList: true},
	{source: Torchrun, rank: []string{"RANK"}, needs: []string{"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}, world: []string{"WORLD_SIZE"},
		localRank: []string{"LOCAL_RANK"}, localWorld: []string{"LOCAL_WORLD_SIZE"}},
	// RANK and WORLD_SIZE without a torchrun address, for ranks that meet only through NCCL.
	{source: Torchrun, rank: []string{"RANK"}, needs: []string{"WORLD_SIZE", NCCLRoot}, world: []string{"WORLD_SIZE"},
		localRank: []string{"LOCAL_RANK"}, localWorld: []string{"LOCAL_WORLD_SIZE"}},
	// An indexed Job does not set its size. Without WORLD_SIZE its pods are independent runs,
	// as in a sweep.
	{source: Kubernetes, rank: []string{"JOB_COMPLETION_INDEX"}, needs: []string{"WORLD_SIZE"}, world: []string{"WORLD_SIZE"},
		localRank: []string{"LOCAL_RANK"}, localWorld: []string{"LOCAL_WORLD_SIZE"}},
}

// Read returns the place in its job that a process's environment variables give. It rejects
// contradictory variables, and the error names them.
func Read(getenv func(string) string) (Env, error) {
	for _, f := range forms {
		name, rank := first(getenv, f.rank)
		if name == "" || !all(getenv, f.needs) {
			continue
		}
		e := Env{Source: f.source}
		var err error
		if e.Rank, err = number(name, rank, 0); err != nil {
			return Env{}, err
		}
		world, size := first(getenv, f.world)
		if world == "" {
			return Env{}, fmt.Errorf("%s=%s without %s: %s", name, rank, strings.Join(f.world, " or "), f.worldMissing)
		}
		if e.World, err = number(world, size, 1); err != nil {
			return Env{}, err
		}
		if e.Rank >= e.World {
			return Env{}, fmt.Errorf("%s=%d is not a rank of %s=%d", name, e.Rank, world, e.World)
		}
		e.NCCLRoot = getenv(NCCLRoot)
		return e, e.local(getenv, f)
	}
	return Env{World: 1, LocalWorld: 1}, nil
}

// local fills in LocalRank and LocalWorld.
func (e *Env) local(getenv func(string) string, f form) (err error) {
	if name, v := first(getenv, f.localRank); name != "" {
		if e.LocalRank, err = number(name, v, 0); err != nil {
			return err
		}
	}
	switch name, v := first(getenv, f.localWorld); {
	case e.Source == Launch:
		e.LocalRank, e.LocalWorld = e.Rank, e.World
	case name == "":
	case f.localIsList:
		if e.LocalWorld, err = tasksHere(name, v, getenv("SLURM_NODEID")); err != nil {
			return err
		}
	default:
		if e.LocalWorld, err = number(name, v, 1); err != nil {
			return err
		}
	}
	if e.LocalWorld > 0 && e.LocalRank >= e.LocalWorld {
		return fmt.Errorf("the environment of %s says local rank %d of %d on this host", e.Source, e.LocalRank, e.LocalWorld)
	}
	if v := getenv(LaunchThreads); v != "" && e.Source == Launch {
		e.Threads, err = number(LaunchThreads, v, 1)
	}
	return err
}

// tasksHere returns the number of tasks on a node from Slurm's list of tasks by node, such as
// "2(x3),1".
func tasksHere(name, list, node string) (int, error) {
	wrong := fmt.Errorf("%s=%.80q is not a list of tasks by node", name, list)
	at := 0
	if node != "" {
		var err error
		if at, err = number("SLURM_NODEID", node, 0); err != nil {
			return 0, err
		}
	}
	for _, part := range strings.Split(list, ",") {
		tasks, times, repeated := strings.Cut(strings.TrimSuffix(part, ")"), "(x")
		n, err := strconv.Atoi(tasks)
		count := 1
		if repeated && err == nil {
			count, err = strconv.Atoi(times)
		}
		if err != nil || n < 1 || count < 1 {
			return 0, wrong
		}
		if at < count {
			return n, nil
		}
		at -= count
	}
	return 0, wrong
}

func first(getenv func(string) string, names []string) (name, value string) {
	for _, n := range names {
		if v := getenv(n); v != "" {
			return n, v
		}
	}
	return "", ""
}

func all(getenv func(string) string, names []string) bool {
	return !slices.ContainsFunc(names, func(n string) bool { return getenv(n) == "" })
}

func number(name, value string, least int) (int, error) {
	n, err := strconv.Atoi(value)
	if err != nil || n < least || n > 1<<20 {
		return 0, fmt.Errorf("%s=%.80q: want a number from %d", name, value, least)
	}
	return n, nil
}

// Transports of ranks. Ranks on GPUs in several processes communicate over NCCL; their
// processes also need SHM or MPI to find each other.
const (
	Auto   = "auto"
	InProc = "inproc"
	SHM    = "shm"
	MPI    = "mpi"
	NCCL   = "nccl"
)

// CPUsCantMeet returns the error for CPU ranks that no transport can connect.
func (e Env) CPUsCantMeet() error {
	return fmt.Errorf("started by %s as rank %d of %d: CPU ranks have nothing to meet by there; start them %s; ranks on GPUs meet by %s=HOST:PORT",
		e.Source, e.Rank, e.World, meetingPlaces, NCCLRoot)
}

const meetingPlaces = "with mpirun (under Slurm: srun with MPI plugin pmix or pmi2, what the MPI was built for; in a Kubernetes cluster: an MPIJob), or with spillway launch on one host"

// gpusNeedRoot returns the error for ranks on GPUs without an address for NCCL.
func (e Env) gpusNeedRoot() error {
	return fmt.Errorf("started by %s as rank %d of %d: ranks on GPUs meet by %s=HOST:PORT, a free port of rank 0's host, the same for all, and it is not set; set it, or start them %s",
		e.Source, e.Rank, e.World, NCCLRoot, meetingPlaces)
}

// checkRoot rejects an NCCL_COMM_ID that is not an address.
func (e Env) checkRoot() error {
	i := strings.LastIndexByte(e.NCCLRoot, ':')
	if i > 0 {
		host := e.NCCLRoot[:i]
		port, err := strconv.Atoi(e.NCCLRoot[i+1:])
		inBrackets := len(host) > 2 && host[0] == '[' && host[len(host)-1] == ']'
		if err == nil && port > 0 && port < 1<<16 && (inBrackets || !strings.ContainsAny(host, ":[] /")) {
			return nil
		}
	}
	return fmt.Errorf("%s=%.80q: want HOST:PORT, a free port of rank 0's host, as in node-0:29500 or [fd00::1]:29500", NCCLRoot, e.NCCLRoot)
}

// Overlooked returns the reason why a process that Read considers alone may be one of several; ""
// if nothing suggests it.
func Overlooked(getenv func(string) string) string {
	count := func(name string) int {
		n, err := strconv.Atoi(getenv(name))
		if err != nil {
			return 0
		}
		return n
	}
	if n := max(count("SLURM_NTASKS"), count("SLURM_NPROCS")); n > 1 && getenv("SLURM_STEP_NUM_TASKS") == "" {
		return fmt.Sprintf("this is not a task of Slurm's job of %d tasks but the script around it: the run is alone; srun spillway train … starts it as %[1]d", n)
	}
	if n := count("WORLD_SIZE"); n > 1 {
		if _, err := strconv.Atoi(getenv("RANK")); err == nil {
			return fmt.Sprintf("RANK=%s and WORLD_SIZE=%d stand without MASTER_ADDR and MASTER_PORT, or %s: the run is alone", getenv("RANK"), n, NCCLRoot)
		}
	}
	return ""
}

// Transport returns the transport asked for. For auto and nccl it chooses one that the environment
// allows. The error for an impossible choice says how to start the ranks instead.
func (e Env) Transport(asked string) (string, error) {
	asked = strings.ToLower(asked)
	hasMPI := e.Source == OpenMPI || e.Source == PMI || e.Source == PMIx
	switch asked {
	case "", Auto:
		switch {
		case e.Source == Launch:
			return SHM, nil
		case hasMPI:
			return MPI, nil
		case e.World == 1:
			return InProc, nil
		case e.NCCLRoot != "":
			return NCCL, e.checkRoot()
		}
		return "", e.CPUsCantMeet()
	case InProc:
		if e.World > 1 {
			return "", fmt.Errorf("Job.Transport inproc: started by %s as rank %d of %d, and inproc joins the ranks of one process; leave it out", e.Source, e.Rank, e.World)
		}
		return asked, nil
	case SHM:
		if e.Source != Launch {
			return "", errors.New("Job.Transport shm joins the processes that spillway launch has started on one host: spillway launch -n N -- train …")
		}
		return asked, nil
	case MPI:
		if !hasMPI {
			return "", errors.New("Job.Transport mpi joins processes that an MPI launcher has started: mpirun -np N spillway train …")
		}
		return asked, nil
	case NCCL:
		switch {
		case e.World == 1:
			return "", errors.New("Job.Transport nccl joins processes with a GPU for each rank: spillway launch -n N -- train …, or mpirun -np N spillway train …; the ranks of one process, on as many GPUs as it sees, need none")
		case e.Source == Launch:
			return SHM, nil
		case hasMPI:
			return MPI, nil
		}
		if e.NCCLRoot != "" {
			return NCCL, e.checkRoot()
		}
		return "", e.gpusNeedRoot()
	}
	return "", fmt.Errorf("Job.Transport %.80q: want auto, inproc, shm, mpi or nccl", asked)
}

// CheckRanks rejects a number of ranks that differs from the job's, which is its processes times
// each, the ranks per process. It accepts any number if there is only one process.
func (e Env) CheckRanks(ranks, each int) error {
	switch {
	case e.World == 1 || ranks == e.World*each:
		return nil
	case each > 1:
		return fmt.Errorf("Config.Ranks %d: %s has started %d processes, and Config.LocalRanks %d makes that %d ranks; leave Config.Ranks out", ranks, e.Source, e.World, each, e.World*each)
	case ranks%e.World == 0:
		return fmt.Errorf("Config.Ranks %d: %s has started %d processes, one a rank; leave Config.Ranks out, or add Config.LocalRanks %d", ranks, e.Source, e.World, ranks/e.World)
	}
	return fmt.Errorf("Config.Ranks %d: %s has started %d processes, one a rank; leave Config.Ranks out", ranks, e.Source, e.World)
}
