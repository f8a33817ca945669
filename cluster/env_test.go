package cluster_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cluster"
)

func env(text string) func(string) string {
	m := map[string]string{}
	for _, f := range strings.Fields(text) {
		k, v, _ := strings.Cut(f, "=")
		m[k] = v
	}
	return func(name string) string { return m[name] }
}

func TestRead(t *testing.T) {
	for _, c := range []struct {
		name, env string
		want      cluster.Env
		transport string // for auto; "" refused
	}{
		{"nobody", "HOME=/x", cluster.Env{World: 1, LocalWorld: 1}, "inproc"},
		{"launch", "SPILLWAY_RANK=2 SPILLWAY_WORLD_SIZE=3 SPILLWAY_THREADS=4", cluster.Env{Source: cluster.Launch, Rank: 2, World: 3, LocalRank: 2, LocalWorld: 3, Threads: 4}, "shm"},
		{"Open MPI", "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_RANK=3 PMIX_NAMESPACE=x",
			cluster.Env{Source: cluster.OpenMPI, Rank: 3, World: 8, LocalRank: 1, LocalWorld: 2}, "mpi"},
		{"MPICH", "PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2 PMI_FD=9", cluster.Env{Source: cluster.PMI, World: 2, LocalWorld: 2}, "mpi"},
		{"MPICH in an sbatch script", "SLURM_PROCID=0 SLURM_NTASKS=4 PMI_RANK=1 PMI_SIZE=4", cluster.Env{Source: cluster.PMI, Rank: 1, World: 4}, "mpi"},
		{"srun with PMIx", "PMIX_RANK=5 PMIX_NAMESPACE=slurm.1.0 SLURM_STEP_NUM_TASKS=6 SLURM_PROCID=5 SLURM_LOCALID=1", cluster.Env{Source: cluster.PMIx, Rank: 5, World: 6, LocalRank: 1}, "mpi"},
		{"srun without MPI", "SLURM_PROCID=6 SLURM_STEP_NUM_TASKS=7 SLURM_LOCALID=0 SLURM_NODEID=3 SLURM_STEP_TASKS_PER_NODE=2(x3),1",
			cluster.Env{Source: cluster.Slurm, Rank: 6, World: 7, LocalWorld: 1}, ""},
		{"a batch script itself", "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0", cluster.Env{World: 1, LocalWorld: 1}, "inproc"},
		{"srun of one task", "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1", cluster.Env{Source: cluster.Slurm, World: 1, LocalWorld: 1}, "inproc"},
		{"torchrun", "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=29500",
			cluster.Env{Source: cluster.Torchrun, Rank: 1, World: 2, LocalRank: 1, LocalWorld: 2}, ""},
		{"ranks with NCCL alone", "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 NCCL_COMM_ID=h:29500",
			cluster.Env{Source: cluster.Torchrun, Rank: 1, World: 2, NCCLRoot: "h:29500"}, "nccl"},
		{"somebody's RANK", "RANK=general WORLD_SIZE=2", cluster.Env{World: 1, LocalWorld: 1}, "inproc"},
		{"an indexed Job with its size", "JOB_COMPLETION_INDEX=3 WORLD_SIZE=4", cluster.Env{Source: cluster.Kubernetes, Rank: 3, World: 4}, ""},
		{"an indexed Job that sweeps", "JOB_COMPLETION_INDEX=3", cluster.Env{World: 1, LocalWorld: 1}, "inproc"},
		{"launch within srun", "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SPILLWAY_RANK=1 SPILLWAY_WORLD_SIZE=2", cluster.Env{Source: cluster.Launch, Rank: 1, World: 2, LocalRank: 1, LocalWorld: 2}, "shm"},
		{"mpirun within a launch of another kind", "RANK=0 WORLD_SIZE=1 MASTER_ADDR=h MASTER_PORT=1 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2",
			cluster.Env{Source: cluster.OpenMPI, Rank: 1, World: 2}, "mpi"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := cluster.Read(env(c.env))
			require.NoError(t, err)
			require.Equal(t, c.want, got)
			transport, err := got.Transport("auto")
			require.Equal(t, c.transport, transport)
			if c.transport == "" {
				require.ErrorContains(t, err, "mpirun")
				require.ErrorContains(t, err, "srun with MPI plugin pmix")
				require.ErrorContains(t, err, "MPIJob")
			}
		})
	}
}

func TestContradictionsAreRefusedByName(t *testing.T) {
	for text, want := range map[string]string{
		"SPILLWAY_RANK=3 SPILLWAY_WORLD_SIZE=3": "SPILLWAY_RANK=3 is not a rank of SPILLWAY_WORLD_SIZE=3",
		"SPILLWAY_RANK=x SPILLWAY_WORLD_SIZE=3": `SPILLWAY_RANK="x": want a number from 0`,
		"OMPI_COMM_WORLD_RANK=1":                "OMPI_COMM_WORLD_RANK=1 without OMPI_COMM_WORLD_SIZE: mpirun sets both",
		"PMI_RANK=-1 PMI_SIZE=2":                `PMI_RANK="-1": want a number from 0`,
		"PMI_RANK=0 PMI_SIZE=0":                 `PMI_SIZE="0": want a number from 1`,
		"PMIX_RANK=0 PMIX_NAMESPACE=x":          "PMIX_RANK=0 without SLURM_STEP_NUM_TASKS or PRTE_NUM_PROCS: PMIx itself does not say it; start with mpirun or srun",
		"RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2":              "the environment of torchrun says local rank 2 of 2 on this host",
		"SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2(y3)":                        `SLURM_STEP_TASKS_PER_NODE="2(y3)" is not a list of tasks by node`,
		"SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1 SLURM_NODEID=4":             `SLURM_STEP_TASKS_PER_NODE="1" is not a list of tasks by node`,
		"SPILLWAY_RANK=0 SPILLWAY_WORLD_SIZE=2 SPILLWAY_THREADS=" + strings.Repeat("9", 90):            `want a number from 1`,
		"SPILLWAY_RANK=0 SPILLWAY_WORLD_SIZE=99999999999999999999999999999999999999999999999999999999": "want a number",
	} {
		_, err := cluster.Read(env(text))
		require.ErrorContains(t, err, want, text)
	}
}

func TestTransport(t *testing.T) {
	alone, launched := cluster.Env{World: 1}, cluster.Env{Source: cluster.Launch, World: 2}
	mpi, torch := cluster.Env{Source: cluster.OpenMPI, Rank: 1, World: 2}, cluster.Env{Source: cluster.Torchrun, World: 2}
	at := func(root string) cluster.Env {
		e := torch
		e.NCCLRoot = root
		return e
	}
	rooted := at("node-0:29501")
	for _, c := range []struct {
		e           cluster.Env
		asked, want string // want beginning with "!" is part of the refusal
	}{
		{alone, "", "inproc"}, {alone, "inproc", "inproc"}, {alone, "shm", "!spillway launch -n N"}, {alone, "mpi", "!mpirun -np N"}, {alone, "nccl", "!spillway launch -n N"},
		{launched, "auto", "shm"}, {launched, "SHM", "shm"}, {launched, "mpi", "!mpirun"}, {launched, "inproc", "!leave it out"},
		{mpi, "auto", "mpi"}, {mpi, "mpi", "mpi"}, {mpi, "shm", "!spillway launch"}, {torch, "mpi", "!mpirun"}, {torch, "tcp", "!want auto"}, {launched, "nccl", "shm"}, {mpi, "NCCL", "mpi"}, {torch, "nccl", "!NCCL_COMM_ID=HOST:PORT"}, {rooted, "auto", "nccl"}, {rooted, "nccl", "nccl"}, {rooted, "mpi", "!mpirun"}, {torch, "auto", "!an MPIJob"},
		{cluster.Env{Source: cluster.Slurm, World: 2}, "nccl", "!ranks on GPUs meet by NCCL_COMM_ID=HOST:PORT"},
		{at("[fd00::1]:29500"), "auto", "nccl"}, {at("10.0.0.1:1"), "nccl", "nccl"},
		{at("node-0"), "auto", "!want HOST:PORT"}, {at("node-0:"), "nccl", "!want HOST:PORT"}, {at(":29500"), "auto", "!want HOST:PORT"}, {at("h:65536"), "auto", "!want HOST:PORT"},
		{at("h:0"), "auto", "!want HOST:PORT"}, {at("fd00::1:29500"), "auto", "!want HOST:PORT"}, {at("[]:29500"), "auto", "!want HOST:PORT"}, {at("tcp://h:29500"), "auto", "!want HOST:PORT"},
	} {
		got, err := c.e.Transport(c.asked)
		if part, refused := strings.CutPrefix(c.want, "!"); refused {
			require.ErrorContains(t, err, part)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, c.want, got)
	}
	require.NoError(t, mpi.CheckRanks(2, 1))
	require.NoError(t, mpi.CheckRanks(6, 3))
	require.NoError(t, alone.CheckRanks(7, 1))
	require.EqualError(t, mpi.CheckRanks(3, 1), "Config.Ranks 3: Open MPI's mpirun has started 2 processes, one a rank; leave Config.Ranks out")
}

// Overlooked reports a process that is alone although its variables suggest others.
func TestOverlooked(t *testing.T) {
	for text, want := range map[string]string{
		"HOME=/x":                        "",
		"SLURM_PROCID=0 SLURM_NTASKS=8":  "srun spillway train … starts it as 8",
		"SLURM_PROCID=0 SLURM_NTASKS=1":  "",
		"SLURM_PROCID=0 SLURM_NPROCS=2":  "Slurm's job of 2 tasks",
		"SLURM_NTASKS=junk":              "",
		"RANK=1 WORLD_SIZE=4":            "RANK=1 and WORLD_SIZE=4 stand without MASTER_ADDR",
		"RANK=general WORLD_SIZE=2":      "",
		"RANK=0 WORLD_SIZE=1":            "",
		"JOB_COMPLETION_INDEX=3":         "",
		"SLURM_NTASKS=8 SLURM_PROCID=-1": "the run is alone",
	} {
		e, err := cluster.Read(env(text))
		require.NoError(t, err)
		require.Equal(t, cluster.Alone, e.Source)
		if want == "" {
			require.Empty(t, cluster.Overlooked(env(text)), text)
			continue
		}
		require.Contains(t, cluster.Overlooked(env(text)), want)
	}
}
