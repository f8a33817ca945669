//go:build linux

package processes

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// mpirun starts the binary in n processes. It skips the test if the launcher is not installed; in
// CI that is a failure.
func mpirun(t *testing.T, launcher string, n int, args ...string) *process {
	t.Helper()
	binary, err := built()
	require.NoError(t, err)
	return mpirunProgram(t, launcher, n, append([]string{binary}, args...)...)
}

func TestMPIGivesTheBitsOfOneProcess(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	for _, launcher := range []string{"mpirun.openmpi", "mpirun.mpich"} {
		for n, flags := range map[int]string{2: "--zero 0 --accum 2", 3: "--zero 3 --recompute full", 4: "--zero 2 --shard-size 2", 6: "--zero 3 --shard-size 3"} {
			if !long.On() && n != map[string]int{"mpirun.openmpi": 3, "mpirun.mpich": 6}[launcher] {
				continue
			}
			t.Run(fmt.Sprint(launcher, " ", n, " ", flags), func(t *testing.T) {
				dir := t.TempDir()
				args := tinyWith(strings.Fields(flags)...)
				one, many := filepath.Join(dir, "one.jsonl"), filepath.Join(dir, "many.jsonl")
				how := map[int]string{2: "tree", 3: "auto", 4: "halving-doubling", 6: "direct"}[n]
				each := 1
				if n == 6 {
					each = 3
				}
				p := mpirun(t, launcher, n/each, append(args, "--metrics", many, "--collectives", how, "--ranks-per-process", strconv.Itoa(each))...)
				require.Zero(t, p.end(t), p.errs.String())
				p = start(t, append(args, "--ranks", strconv.Itoa(n), "--metrics", one)...)
				require.Zero(t, p.end(t), p.errs.String())
				require.Equal(t, outcomeOf(t, one), outcomeOf(t, many))
			})
		}
	}
}

// A run that rank 0 rejects, before or after the processes have met, ends everywhere. The
// launcher's status is that of the rejection. The others' status is 0, since a launcher may combine
// the statuses or return the largest.
func TestMPIEndsWithARefusal(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	binary, err := built()
	require.NoError(t, err)
	for k, launcher := range []string{"mpirun.openmpi", "mpirun.mpich"} {
		for i, c := range []struct {
			flags, want, says string
		}{
			{"--zero 9", "1", "--zero 9: stages are 0, 1, 2 and 3"},
			{"--ranks 4", "1", "--ranks 4: "},
			{"--device-memory 1KiB", "2", "does not fit"},
			{"--data nowhere", "1", "--data: open data: nowhere does not exist"},
		} {
			if !long.On() && i%2 != k {
				continue
			}
			t.Run(launcher+" "+c.flags, func(t *testing.T) {
				t.Parallel()
				dir := t.TempDir()
				// Open MPI's launcher ends the other shells at the first nonzero status; they still
				// write their own.
				script := `trap : TERM; "$@" 2>$0/$OMPI_COMM_WORLD_RANK$PMI_RANK.said; status=$?; echo $status >$0/$OMPI_COMM_WORLD_RANK$PMI_RANK.status; exit $status`
				p := mpirunProgram(t, launcher, 2, append([]string{"/bin/sh", "-c", script, dir, binary}, tinyWith(strings.Fields(c.flags)...)...)...)
				require.Equal(t, c.want, strconv.Itoa(p.end(t)), "the launcher's: %s", p.errs.String())
				require.Equal(t, c.want, statusOf(dir, 0))
				require.Contains(t, saidOf(dir, 0), c.says)
				require.Equal(t, "0", statusOf(dir, 1), saidOf(dir, 1))
				require.Empty(t, saidOf(dir, 1), "rank 0 has said why")
			})
		}
	}
}

// A process that waits in MPI_Init has no state to save: a signal ends it.
func TestASignalEndsAWaitForMPI(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("gcc is not installed")
	}
	dir := t.TempDir()
	library, waits := filepath.Join(dir, "libmpi_abi.so"), filepath.Join(dir, "waits")
	out, err := exec.Command("gcc", "-shared", "-fPIC", "-include", "fcntl.h", fmt.Sprintf("-DINIT=close(creat(%q, 0600)); for (;;) pause()", waits), "-o", library, "../../../../comm/mpi/testdata/stub.c").CombinedOutput()
	require.NoError(t, err, string(out))
	binary, err := built()
	require.NoError(t, err)
	for _, rank := range []string{"0", "1"} {
		_ = os.Remove(waits)
		p := &process{Cmd: exec.Command(binary, tinyRun...)}
		p.Env = append(os.Environ(), "PMI_RANK="+rank, "PMI_SIZE=2", "SPILLWAY_MPI="+library)
		p.Stdout, p.Stderr = &p.out, &p.errs
		require.NoError(t, p.Start())
		t.Cleanup(func() { _ = p.Process.Kill() })
		waitFor(t, "MPI_Init", func() bool { _, err := os.Stat(waits); return err == nil })
		require.NoError(t, p.Process.Signal(syscall.SIGTERM))
		require.Equal(t, cli.ExitInterrupted, p.end(t), p.errs.String())
	}
}

// A rank that is stopped is named by its heartbeat and ends the job at the timeout, over MPI as in
// shared memory.
func TestMPINamesAStoppedRank(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	for _, launcher := range []string{"mpirun.openmpi", "mpirun.mpich"} {
		t.Run(launcher, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "pid") // the process of rank 1; launchers start ranks in different ways
			binary, err := built()
			require.NoError(t, err)
			script := fmt.Sprintf(`[ "$OMPI_COMM_WORLD_RANK$PMI_RANK" = 1 ] && echo $$ > %s; exec %s "$@"`, file, binary)
			p := mpirunProgram(t, launcher, 2, append([]string{"/bin/sh", "-c", script, "rank"}, tinyWith("--steps", "1000000", "--timeout", "4s")...)...)
			waitFor(t, "first step", func() bool { return strings.Contains(p.errs.String()+p.out.String(), "step ") })
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
			require.NoError(t, err)
			if launcher == "mpirun.mpich" { // its MPI library started a relay process
				require.Len(t, childrenOf(pid), 1)
				pid = childrenOf(pid)[0]
			}
			require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
			require.NotZero(t, p.end(t))
			_ = syscall.Kill(pid, syscall.SIGKILL) // the launcher may not have killed it yet
			said := p.errs.String() + p.out.String()
			named := regexp.MustCompile(fmt.Sprintf(`warning: rank 1 \(host .*, process %d\) gives no sign of life.*; the job ends in (\S+) unless it comes back`, pid)).FindStringSubmatch(said)
			require.NotNil(t, named, said)
			left, err := time.ParseDuration(named[1])
			require.NoError(t, err)
			// Measured by the watchdog's clock, which excludes time that the machine took from the
			// process.
			require.Greater(t, left, 2*time.Second, "named within 2 s of the 4 s")
			require.Regexp(t, fmt.Sprintf(`timeout: .*rank 1 \(host .*, process %d\)`, pid), said)
			require.Contains(t, said, "the last operations of rank 0")
		})
	}
}

// mpirunProgram starts any program in n processes.
func mpirunProgram(t *testing.T, launcher string, n int, program ...string) *process {
	t.Helper()
	path, err := exec.LookPath(launcher)
	if err != nil && os.Getenv("SPILLWAY_TEST_MPI") == "" {
		t.Skipf("%s is not installed", launcher)
	}
	require.NoError(t, err)
	line := []string{"-np", strconv.Itoa(n)}
	if launcher == "mpirun.openmpi" {
		// To end a rank, or itself, the launcher waits this long, signals the ranks, and waits as
		// long again even if they have ended. With its default of 1 s busy ranks were killed.
		line = append(line, "--oversubscribe", "--mca", "odls_base_sigkill_timeout", "5")
		if os.Geteuid() == 0 {
			line = append(line, "--allow-run-as-root")
		}
	}
	p := &process{Cmd: exec.Command(path, append(line, program...)...)}
	p.Stdout, p.Stderr = &p.out, &p.errs
	require.NoError(t, p.Start())
	t.Cleanup(func() { _ = p.Process.Kill() })
	return p
}

// A terminated launcher signals its ranks, which save first. Its own status is not tested.
func TestMPISavesWhenItsLauncherIsTerminated(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	for _, launcher := range []string{"mpirun.openmpi", "mpirun.mpich"} {
		t.Run(launcher, func(t *testing.T) {
			t.Parallel()
			binary, err := built()
			require.NoError(t, err)
			dir := filepath.Join(t.TempDir(), "run")
			p := mpirunProgram(t, launcher, 2, append([]string{binary}, tinyWith("--steps", "1000000", "--checkpoint", dir)...)...)
			waitFor(t, "first step", func() bool { return strings.Contains(p.errs.String()+p.out.String(), "step ") })
			require.NoError(t, p.Process.Signal(syscall.SIGTERM))
			p.end(t)
			require.Regexp(t, `interrupted after step [0-9]+; the checkpoint in`, p.errs.String()+p.out.String())
			out, err := exec.Command(binary, "ckpt", "verify", dir).CombinedOutput()
			require.NoError(t, err, string(out))
		})
	}
}
