package processes

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// parting is a job of two processes over MPI, one of which does not return from MPI_Finalize
// correctly (testdata/finalize.c). Each writes its output with its exit status or its number to a
// folder, as the run does its metrics and its checkpoint.
type parting struct {
	*process
	dir string
}

// partOf starts the job. With alone, options make the launcher continue if a process has died, so
// that it does not end the others.
func partOf(t *testing.T, launcher, how string, who int, alone bool) parting {
	t.Helper()
	binary, err := built()
	require.NoError(t, err)
	e := parting{dir: t.TempDir()}
	path := func(name string) string { return filepath.Join(e.dir, name) }
	library := map[string]string{"mpirun.openmpi": "libmpi.so.40", "mpirun.mpich": "libmpich.so.12"}[launcher]
	line := []string{"env", "SPILLWAY_MPI=" + path("libfinalize.so"), "SPILLWAY_TEST_FINALIZE=" + how, "SPILLWAY_TEST_FINALIZE_RANK=" + strconv.Itoa(who), "/bin/sh", "-c"}
	if alone { // MPICH's launcher sends SIGUSR1 to the others when a process has died
		line = append(line, `trap '' USR1; to=$0/$OMPI_COMM_WORLD_RANK$PMI_RANK; "$@" 2>$to.said; echo $? >$to.new; mv $to.new $to.status`)
	} else {
		line = append(line, `to=$0/$OMPI_COMM_WORLD_RANK$PMI_RANK; echo $$ >$to.pid; exec "$@" 2>$to.said`)
	}
	line = append(line, e.dir, binary)
	line = append(line, tinyWith("--checkpoint", path("ck"), "--metrics", path("many.jsonl"))...)
	if alone {
		line = append(map[string][]string{"mpirun.openmpi": {"--mca", "orte_abort_on_non_zero_status", "0", "--mca", "orte_allowed_exit_without_sync", "1"},
			"mpirun.mpich": {"-disable-auto-cleanup"}}[launcher], line...)
	}
	if _, err := exec.LookPath(launcher); err == nil {
		out, err := exec.Command("gcc", "-shared", "-fPIC", "-o", path("libfinalize.so"), "testdata/finalize.c", "-Wl,--no-as-needed", "-l:"+library).CombinedOutput()
		require.NoError(t, err, string(out))
	}
	e.process = mpirunProgram(t, launcher, 2, line...)
	return e
}

// pid returns the process of a rank.
func (e parting) pid(t *testing.T, rank int) int {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(e.dir, fmt.Sprint(rank, ".pid")))
	require.NoError(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	require.NoError(t, err)
	return pid
}

// endOfLauncher waits for the launcher after its ranks, and kills it if it does not end; its status
// is not tested. Open MPI 4.1's was found in a deadlock in PMIx (one thread in
// PMIx_server_deregister_client, the other at a mutex) after all its ranks had ended.
func (e parting) endOfLauncher(t *testing.T) {
	t.Helper()
	late := time.AfterFunc(20*time.Second, func() {
		t.Log("the launcher does not end behind its ranks")
		_ = e.Process.Kill()
	})
	e.end(t)
	late.Stop()
}

// whole checks that the run's output is complete.
func (e parting) whole(t *testing.T, one outcome) {
	t.Helper()
	require.Equal(t, one, outcomeOf(t, filepath.Join(e.dir, "many.jsonl")))
	binary, err := built()
	require.NoError(t, err)
	out, err := exec.Command(binary, "ckpt", "verify", filepath.Join(e.dir, "ck")).CombinedOutput()
	require.NoError(t, err, string(out))
}

// inOneProcess returns the outcome of the run of partOf in one process.
func inOneProcess(t *testing.T) outcome {
	t.Helper()
	file := filepath.Join(t.TempDir(), "one.jsonl")
	p := start(t, tinyWith("--ranks", "2", "--metrics", file)...)
	require.Zero(t, p.end(t), p.errs.String())
	return outcomeOf(t, file)
}

// A completed run ends even if MPI does not. If a rank's MPI_Finalize hangs, fails or is not
// reached, every process ends soon without help. Its status is that of its work, and a line gives
// the reason. The written files are complete.
func TestARunThatIsDoneIsOver(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	one := inOneProcess(t)
	for k, launcher := range []string{"mpirun.openmpi", "mpirun.mpich"} {
		for i, c := range []struct {
			how    string
			who    int
			status string // of rank who; the other rank's is 0
		}{{"hang", 0, "0"}, {"fail", 1, "0"}, {"late", 1, "0"}, {"die", 1, "137"}, {"hang", 1, "0"}} {
			if !long.On() && (i%2 != k || i == 4) { // each case runs with one launcher
				continue
			}
			t.Run(fmt.Sprint(launcher, "/", c.how, "/", c.who), func(t *testing.T) {
				t.Parallel()
				e := partOf(t, launcher, c.how, c.who, true)
				for rank := range 2 {
					waitFor(t, "end of every rank", func() bool { return statusOf(e.dir, rank) != "" })
				}
				e.endOfLauncher(t)
				require.Equal(t, c.status, statusOf(e.dir, c.who), saidOf(e.dir, c.who))
				require.Equal(t, "0", statusOf(e.dir, 1-c.who), saidOf(e.dir, 1-c.who))
				if c.how != "die" {
					said := saidOf(e.dir, c.who)
					require.Equal(t, 1, strings.Count(said, fmt.Sprintf("warning: process %d leaves MPI without its end: ", c.who)), said)
					require.Contains(t, said, "; all is done and written")
				}
				e.whole(t, one)
			})
		}
	}
}

// A rank that is stopped while it ends does not block the others: they end, and the launcher ends
// it.
func TestARankThatIsStoppedOnTheWayOut(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	one := inOneProcess(t)
	for _, launcher := range []string{"mpirun.openmpi", "mpirun.mpich"} {
		t.Run(launcher, func(t *testing.T) {
			t.Parallel()
			e := partOf(t, launcher, "stop", 1, false)
			e.end(t)
			for rank := range 2 {
				waitFor(t, "end of every rank", func() bool { return gone(e.pid(t, rank)) })
			}
			require.Contains(t, saidOf(e.dir, 0), "warning: process 0 leaves MPI without its end: ")
			e.whole(t, one)
		})
	}
}
