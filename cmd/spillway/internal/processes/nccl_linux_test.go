package processes

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/root"
	"github.com/spillway-ml/spillway/comm/nccl"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/internal/testkit/blastest"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/internal/testkit/nccltest"
	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
	"github.com/spillway-ml/spillway/internal/testkit/shim"
	"github.com/spillway-ml/spillway/kernels"
	kernelscuda "github.com/spillway-ml/spillway/kernels/cuda"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/platform/gpu"
)

func init() { onDoubles = runOnDoubles }

// foundByDoubles is the status of a command that succeeded but did not release its GPUs' resources.
const foundByDoubles = 99

// runOnDoubles runs the command on doubles of the driver, of cuBLASLt and of NCCL, with the GPU
// kernels compiled for the host.
func runOnDoubles() int {
	ownworld.CollectLess()
	devices, err := strconv.Atoi(os.Getenv(doublesEnv))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return cli.ExitBadInput
	}
	d := drivertest.New(drivertest.Options{Devices: devices, Memory: 4 << 30})
	version := 22105
	if dies := os.Getenv(diesEnv); dies != "" {
		version = nccl.ShrinkVersion
	}
	library := nccltest.NewWire(d, version, 3<<20)
	gpu.DoubleCUDA(gpu.Parts{
		Driver: func() (driver.API, error) { return d, nil },
		Used:   func([16]byte) (int64, error) { return 0, nil },
		NCCL:   func() (nccl.API, error) { return dying(library), nil },
		Kernels: func(_ platform.Options, api driver.API, dev driver.Device, host kernels.Library) (gpu.Kernels, error) {
			compiler, err := shim.New()
			if err != nil {
				return nil, err
			}
			return gpu.NewKernels(kernelscuda.Options{API: api, Device: dev, Compiler: compiler, Products: blastest.New(d), Host: host})
		},
	})
	status := root.Execute(os.Args[1:], os.Stdout, os.Stderr)
	if status != cli.ExitDone {
		return status // the resources of a failed job end with its process
	}
	if err := errors.Join(library.Close(), d.Close()); err != nil {
		fmt.Fprintln(os.Stderr, "doubles:", err)
		return foundByDoubles
	}
	return status
}

// onGPUs returns a command that runs as on a machine with a number of GPUs: this test's binary,
// selected by its environment, which child processes inherit.
func onGPUs(t *testing.T, gpus int, args ...string) (program []string) {
	t.Helper()
	if testing.Short() {
		t.Skip("starts processes")
	}
	if _, err := shim.New(); errors.Is(err, shim.ErrNoCompiler) {
		t.Skip(err)
	}
	self, err := os.Executable()
	require.NoError(t, err)
	return append([]string{"env", fmt.Sprint(doublesEnv, "=", gpus), self}, args...)
}

func startProgram(t *testing.T, env []string, program ...string) *process {
	t.Helper()
	p := &process{Cmd: exec.Command(program[0], program[1:]...)}
	p.Stdout, p.Stderr, p.Env = &p.out, &p.errs, append(os.Environ(), env...)
	p.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a shell's children end with it
	require.NoError(t, p.Start())
	t.Cleanup(func() { _ = syscall.Kill(-p.Process.Pid, syscall.SIGKILL) })
	return p
}

// Ranks with a GPU each in several processes, with NCCL and the launcher's transport, or NCCL
// alone, have the bits of as many GPUs in one process.
func TestNCCLBetweenProcesses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	metrics := func(name string, under ...string) (string, []string) {
		file := filepath.Join(dir, name+".jsonl")
		return file, onGPUs(t, 2, append(under, tinyWith("--device", "cuda", "--seq", "8", "--clip", "1", "--metrics", file)...)...)
	}
	one, line := metrics("one")
	p := startProgram(t, nil, append(line, "--ranks", "2")...)
	require.Zero(t, p.end(t), p.errs.String())
	want := outcomeOf(t, one)
	require.Equal(t, want.planned, want.peaks)

	t.Run("launch", func(t *testing.T) {
		file, line := metrics("launch", "launch", "-n", "2", "--")
		p := startProgram(t, nil, line...)
		require.Zero(t, p.end(t), p.errs.String())
		require.Equal(t, want, outcomeOf(t, file))
	})
	for _, launcher := range long.Or([]string{"mpirun.openmpi"}, []string{"mpirun.openmpi", "mpirun.mpich"}) {
		t.Run(launcher, func(t *testing.T) {
			file, line := metrics(launcher)
			p := mpirunProgram(t, launcher, 2, line...)
			require.Zero(t, p.end(t), p.errs.String())
			require.Contains(t, p.errs.String()+p.out.String(), "NCCL 2.21.5 between processes")
			require.Equal(t, want, outcomeOf(t, file))
		})
	}
	t.Run("torchrun's variables", func(t *testing.T) {
		file, line := metrics("torchrun")
		list := torchrun(t, 2, line...)
		for _, p := range list {
			require.Zero(t, p.end(t), p.errs.String())
		}
		require.Equal(t, want, outcomeOf(t, file))
	})
}

// The same with two ranks in each process, sharded within a process and reduced across.
func TestNCCLBetweenProcessesOfSeveralRanks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	args := onGPUs(t, 4, tinyWith("--device", "cuda", "--seq", "8", "--steps", "1", "--shard-size", "2")...)
	one, many := filepath.Join(dir, "one.jsonl"), filepath.Join(dir, "many.jsonl")
	p := startProgram(t, nil, append(args, "--ranks", "4", "--metrics", one)...)
	require.Zero(t, p.end(t), p.errs.String())
	p = mpirunProgram(t, "mpirun.openmpi", 2, append(args, "--ranks-per-process", "2", "--metrics", many)...)
	require.Zero(t, p.end(t), p.errs.String())
	require.Equal(t, outcomeOf(t, one), outcomeOf(t, many))
}

// If a process with a GPU dies during the run, the others end with status 3, and no process
// remains. NCCL itself does not notice. The other transport names the rank: at once under launch,
// otherwise at the timeout if the launcher lets the others run that long. MPICH's sends them
// SIGUSR1.
func TestNCCLLosesAProcess(t *testing.T) {
	t.Parallel()
	shape := tinyWith("--device", "cuda", "--seq", "8")
	p := startProgram(t, nil, onGPUs(t, 2, append(shape, "--ranks", "2")...)...) // compiles the kernels for the tests below
	require.Zero(t, p.end(t), p.errs.String())
	endless := append(shape, "--steps", "1000000", "--timeout", "5s")
	firstStep := func(p *process) func() bool {
		return func() bool { return strings.Contains(p.errs.String()+p.out.String(), "step 1/") }
	}
	t.Run("launch", func(t *testing.T) {
		t.Parallel()
		p := startProgram(t, nil, onGPUs(t, 2, launched(2, endless...)...)...)
		pids := ranksOf(t, p, 2)
		waitFor(t, "first step", firstStep(p))
		require.NoError(t, syscall.Kill(pids[1], syscall.SIGKILL))
		require.Equal(t, cli.ExitFault, p.end(t), p.errs.String())
		require.Contains(t, p.errs.String(), fmt.Sprintf("rank 1 (process %d): signal: killed", pids[1]))
		require.True(t, gone(pids[0]) && gone(pids[1]))
	})
	// Each rank writes its process's number, its output and its status.
	script := `trap "" USR1; of=$0/$OMPI_COMM_WORLD_RANK$PMI_RANK$RANK; "$@" 2>$of.said & pid=$!; echo $pid >$of.new; mv $of.new $of.pid; wait $pid; echo $? >$of.new; mv $of.new $of.status`
	launchers := map[string][]string{"mpirun.mpich": {"-disable-auto-cleanup"}}
	if long.On() {
		launchers["mpirun.openmpi"] = []string{"--mca", "orte_abort_on_non_zero_status", "0", "--mca", "orte_allowed_exit_without_sync", "1"}
		launchers["torchrun's variables"] = nil // TestSurvivorsGoOn covers it by default
	}
	for launcher, flags := range launchers {
		t.Run(launcher, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			told := func(rank int, what string) string {
				text, _ := os.ReadFile(filepath.Join(dir, fmt.Sprint(rank, ".", what))) // "" before the file exists
				return strings.TrimSpace(string(text))
			}
			line := append([]string{"/bin/sh", "-c", script, dir}, onGPUs(t, 2, endless...)...)
			var list []*process
			if flags == nil {
				list = torchrun(t, 2, line...)
			} else {
				list = append(list, mpirunProgram(t, launcher, 2, append(flags, line...)...))
			}
			waitFor(t, "first step", func() bool {
				require.Empty(t, told(0, "status"), told(0, "said"))
				return strings.Contains(told(0, "said"), "step 1/")
			})
			victim, err := strconv.Atoi(told(1, "pid"))
			require.NoError(t, err)
			require.NoError(t, syscall.Kill(victim, syscall.SIGKILL))
			for _, p := range list {
				p.end(t) // the launcher's status is not tested
			}
			require.Equal(t, strconv.Itoa(cli.ExitFault), told(0, "status"), told(0, "said"))
			require.Regexp(t, `spillway: .*timeout: .*rank 1 `, told(0, "said"))
			require.Contains(t, told(0, "said"), "the last operations of rank 0 over NCCL:")
		})
	}
}

// torchrun starts a program as the ranks of a job that torchrun's variables describe.
func torchrun(t *testing.T, world int, program ...string) (list []*process) {
	t.Helper()
	return torchrunEach(t, make([][]string, world), program...)
}

// torchrunEach is torchrun with additional variables for each rank.
func torchrunEach(t *testing.T, own [][]string, program ...string) (list []*process) {
	t.Helper()
	world, at := len(own), quietAddress(t)
	for rank := range world {
		list = append(list, startProgram(t, append(own[rank], "NCCL_COMM_ID="+at, "MASTER_ADDR=127.0.0.1", "MASTER_PORT=1", fmt.Sprint("WORLD_SIZE=", world),
			fmt.Sprint("LOCAL_WORLD_SIZE=", world), fmt.Sprint("RANK=", rank), fmt.Sprint("LOCAL_RANK=", rank)), program...))
	}
	return list
}

// quiet holds the ports that quietAddress has returned: concurrent jobs must not share one.
var quiet sync.Map

// quietAddress returns an address of this host for a process to listen on later. Its port is below
// those that systems assign automatically, so that no connection uses it meanwhile.
func quietAddress(t *testing.T) string {
	t.Helper()
	for range 1000 {
		at := fmt.Sprint("127.0.0.1:", 12000+rand.IntN(20000))
		if _, given := quiet.LoadOrStore(at, true); given {
			continue
		}
		if l, err := net.Listen("tcp", at); err == nil {
			require.NoError(t, l.Close())
			return at
		}
	}
	require.Fail(t, "no port of 127.0.0.1 is free from 12000 to 31999")
	return ""
}
