package processes

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/relay"
	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// The table of process lives: the starter of a job, the event, the moment, and the command.
// TestProcessLives runs every possible cell with SPILLWAY_LONG=1, otherwise 8 random ones.
var (
	// lifeStarters: systemd and srun are their signal sequences, sent to a job that a shell
	// started. srun itself is not run: it needs a Slurm cluster. The starter launch is the command
	// launch.
	lifeStarters = []string{"shell", "nohup", "background", "tmux", "systemd", "srun", "mpirun.openmpi", "mpirun.mpich"}
	lifeEvents   = []string{"HUP", "INT", "TERM", "KILL", "STOP", "suspend"}
	lifeMoments  = []string{"start", "step", "save", "eval", "end"}
	lifeCommands = []string{"train", "launch", "restarts", "min-ranks"}
)

// A life is a cell of the table.
type life struct{ starter, event, moment, command string }

func (l life) String() string {
	return strings.Join([]string{l.starter, l.event, l.moment, l.command}, "/")
}

func (l life) mpi() bool { return strings.HasPrefix(l.starter, "mpirun") }

// impossible returns the reason why a cell cannot exist; "": it can.
func (l life) impossible() string {
	switch {
	case l.mpi() && l.command != "train":
		return "under mpirun there is no spillway launch"
	case l.event == "STOP" && l.command == "train" && !l.mpi():
		return "a process that is stopped alone is the whole job: suspend"
	case l.event == "STOP" && (l.starter == "systemd" || l.starter == "srun"):
		return "it stops no single process of a job"
	case l.event == "HUP" && l.starter == "srun":
		return "srun sends no hangup"
	}
	return ""
}

// allLives lists the possible cells, and counts the others by their reason.
func allLives() (list []life, impossible map[string]int) {
	impossible = map[string]int{}
	for _, s := range lifeStarters {
		for _, e := range lifeEvents {
			for _, m := range lifeMoments {
				for _, c := range lifeCommands {
					l := life{s, e, m, c}
					if why := l.impossible(); why != "" {
						impossible[why]++
						continue
					}
					list = append(list, l)
				}
			}
		}
	}
	return list, impossible
}

// outcome returns the allowed exit statuses of a cell, whether the run continues after the event,
// and the expected message.
func (l life) outcome() (statuses []int, goesOn bool, says string) {
	group := l.starter == "systemd" || l.starter == "srun"
	switch {
	case l.event == "suspend", l.starter == "nohup" && l.event == "HUP", l.starter == "background" && l.event == "INT":
		goesOn = true
	case l.mpi():
		statuses = nil // MPI launchers choose their status, see docs/howto.md
		if l.event == "STOP" {
			says = `timeout: .*rank 1 \(host .*, process %d\)`
			if l.moment == "start" { // it may be in MPI_Init, which names no rank
				says += `|timeout: rank 0 of 2: MPI_Init has not come back`
			}
		}
	case l.event == "HUP" || l.event == "INT" || l.event == "TERM":
		statuses, says = []int{cli.ExitInterrupted}, "interrupted"
		if l.moment == "start" && l.command != "train" {
			says = "" // rank 0 may not handle signals yet
		}
	case l.event == "KILL" && (l.command == "train" || group):
		statuses = []int{128 + 9}
		if group { // it may have saved before the KILL
			statuses = append(statuses, cli.ExitInterrupted)
		}
	case l.command == "launch" && l.event == "KILL":
		statuses, says = []int{cli.ExitFault}, `rank 1 \(process %d\): signal: killed`
	case l.command == "launch":
		statuses, says = []int{cli.ExitFault}, `rank 1 \(host .*, process %d\)`
	case l.command == "restarts":
		goesOn, says = true, "starting again from"
	case l.command == "min-ranks":
		goesOn, says = true, "going on with 1 rank"
	}
	if l.moment == "end" { // the event may happen after the end
		statuses, goesOn, says = append(statuses, cli.ExitDone), false, ""
		if l.event == "STOP" {
			statuses = append(statuses, cli.ExitFault)
		}
		if l.mpi() {
			statuses = nil
		}
	}
	return statuses, goesOn, says
}

// living is the running job of a cell.
type living struct {
	life
	t    *testing.T
	dir  string
	mark string // in the environment of each of its processes
	tmux string // the socket's name
	ends chan struct{}
	seen map[int]bool // processes of the job, some of which have ended
}

func (l *living) path(name string) string { return filepath.Join(l.dir, name) }

func (l *living) read(name string) string {
	text, _ := os.ReadFile(l.path(name))
	return string(text)
}

// lines returns the number of steps that the run has reported, before and after restarts.
func (l *living) lines() int { return strings.Count(l.read("m.jsonl"), "\n") }

var (
	livesBegun  atomic.Int64
	livesAtOnce = make(chan struct{}, long.Or(2, 4))
)

// begin starts the job of a cell by a script, which writes the main process's number and its exit
// status.
func begin(t *testing.T, c life, binary string) *living {
	l := &living{life: c, t: t, dir: t.TempDir(), ends: make(chan struct{}), seen: map[int]bool{}}
	l.mark = fmt.Sprintf("SPILLWAY_TEST_LIFE=%d.%d", os.Getpid(), livesBegun.Add(1))
	require.NoError(t, os.Mkdir(l.path("tmp"), 0o755))
	line := []string{binary}
	switch c.command {
	case "launch":
		line = append(line, "launch", "-n", "2", "--")
	case "restarts":
		line = append(line, "launch", "-n", "2", "--restarts", "5", "--")
	case "min-ranks":
		line = append(line, "launch", "-n", "2", "--min-ranks", "1", "--")
	}
	steps := "1000000"
	if c.moment == "end" {
		steps = "3"
	}
	testdata, err := filepath.Abs(testdata)
	require.NoError(t, err)
	line = append(line, "train", "--model", testdata+"/gpt2", "--data", testdata+"/text.bin", "--steps", steps, "--batch", "1", "--seq", "16", "--threads", "1",
		"--reproducible", "--global-batch", "2", "--checkpoint", l.path("ck"), "--metrics", l.path("m.jsonl"), "--async-save", "off", "--keep", "3")
	if c.command == "train" && !c.mpi() {
		line = append(line, "--ranks", "2")
	}
	switch c.moment {
	case "save":
		line = append(line, "--save-every", "1")
	case "eval": // nearly all of the time goes into evaluations
		line = append(line, "--eval-data", testdata+"/text.bin", "--eval-every", "1", "--eval-steps", "200", "--save-every", "2")
	default:
		line = append(line, "--save-every", "3")
	}
	if c.event == "STOP" || c.event == "suspend" {
		line = append(line, "--timeout", long.Or("8s", "10s"))
	}
	for i := range line {
		line[i] = "'" + line[i] + "'"
	}
	program := strings.Join(line, " ")
	inner := "exec " + program
	switch c.starter {
	case "nohup":
		inner = "exec nohup " + program
	case "mpirun.openmpi":
		inner = "exec mpirun.openmpi --mca odls_base_sigkill_timeout 6 -x SPILLWAY_TEST_LIFE --oversubscribe --allow-run-as-root -np 2 " + program
	case "mpirun.mpich":
		inner = "exec mpirun.mpich -np 2 " + program
	}
	// The shell writes the status itself: a later event would end another program.
	run := "sh -c 'echo $$ >pid.new; mv pid.new pid; . ./inner' >out 2>err </dev/null; echo $? >status"
	if c.starter == "background" {
		run = program + " >out 2>err & echo $! >pid.new; mv pid.new pid; wait $!; echo $? >status"
	}
	require.NoError(t, os.WriteFile(l.path("inner"), []byte(inner+"\n"), 0o644))
	caught := "HUP INT TERM"
	if c.starter == "tmux" { // the terminal's hangup ends this shell, which passes it on to the job
		caught = "INT TERM"
	}
	require.NoError(t, os.WriteFile(l.path("script"), []byte(fmt.Sprintf("cd '%s'\nexport %s TMPDIR='%s'\ntrap : %s\n%s\n", l.dir, l.mark, l.path("tmp"), caught, run)), 0o644))
	cmd := exec.Command("sh", l.path("script"))
	if c.starter == "tmux" {
		l.tmux = strings.ReplaceAll(strings.TrimPrefix(l.mark, "SPILLWAY_TEST_"), "=", "")
		cmd = exec.Command("tmux", "-L", l.tmux, "new-session", "-d", "sh "+l.path("script"))
	}
	require.NoError(t, cmd.Start())
	go func() { _ = cmd.Wait(); close(l.ends) }()
	t.Cleanup(func() {
		for _, pid := range l.processes() {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		if l.tmux != "" {
			_ = exec.Command("tmux", "-L", l.tmux, "kill-server").Run()
		}
	})
	return l
}

// processes returns the job's processes that run Spillway with these variables in their
// environment.
func (l *living) processes(variables ...string) (pids []int) {
	all, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, path := range all {
		text, err := os.ReadFile(path)
		has := func(variable string) bool { return bytes.Contains(append([]byte{0}, text...), []byte("\x00"+variable)) }
		if err != nil || !has(l.mark+"\x00") || slices.ContainsFunc(variables, func(v string) bool { return !has(v) }) {
			continue
		}
		if exe, err := os.Readlink(filepath.Join(filepath.Dir(path), "exe")); err != nil || filepath.Base(exe) != "spillway" {
			continue
		}
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if !gone(pid) {
			pids = append(pids, pid)
			l.seen[pid] = true
		}
	}
	return pids
}

// over reports whether all processes of the job have ended, including those seen earlier. processes
// does not find a process whose main thread has ended. Another of its threads may still be in the
// kernel; the process then still holds the folder's lock.
func (l *living) over() bool {
	for pid := range l.seen {
		if !gone(pid) {
			return false
		}
	}
	return len(l.processes()) == 0
}

func (l *living) main() int {
	pid, err := strconv.Atoi(strings.TrimSpace(l.read("pid")))
	require.NoError(l.t, err)
	return pid
}

// below returns the variables in the environment of processes with ranks, if others exist.
func (l *living) below() []string {
	if l.starter == "mpirun.mpich" {
		return []string{relay.Variable + "="}
	}
	return nil
}

// rankOne returns the process of rank 1.
func (l *living) rankOne() (pid int) {
	waitFor(l.t, "rank 1", func() bool {
		for _, v := range []string{"SPILLWAY_RANK=1", "OMPI_COMM_WORLD_RANK=1", "PMI_RANK=1"} {
			if found := l.processes(append(l.below(), v+"\x00")...); len(found) > 0 {
				pid = found[0]
				return true
			}
		}
		return l.read("status") != ""
	})
	return pid
}

// reach waits for the moment.
func (l *living) reach() {
	waitFor(l.t, "process", func() bool {
		return l.read("pid") != "" && (len(l.processes(l.below()...)) > 0 || l.read("status") != "")
	})
	over := func() bool { return l.read("status") != "" }
	switch l.moment {
	case "start":
		if pids := l.processes(l.below()...); len(pids) > 0 {
			waitForSignals(l.t, &process{Cmd: &exec.Cmd{Process: &os.Process{Pid: pids[0]}}})
		}
	case "step", "eval":
		waitFor(l.t, "step", func() bool { return l.lines() >= 2 || over() })
	case "end":
		waitFor(l.t, "last step", func() bool { return l.lines() >= 3 || over() })
	case "save":
		waitFor(l.t, "save", func() bool {
			if l.lines() < 2 {
				return over()
			}
			entries, _ := os.ReadDir(l.path("ck"))
			for _, e := range entries {
				if e.IsDir() && !strings.HasPrefix(e.Name(), "step-") {
					return true // a folder that a save writes into
				}
			}
			return over()
		})
	}
}

// fire causes the event, and returns the process if it is that of rank 1.
func (l *living) fire() (victim int) {
	to := func(pids []int, signals ...syscall.Signal) {
		for _, s := range signals {
			for _, pid := range pids {
				if pid > 0 { // 0: it has ended; kill(0) would signal this process's group
					_ = syscall.Kill(pid, s)
				}
			}
		}
	}
	main, group := []int{l.main()}, append(l.processes(), l.main())
	signal := map[string]syscall.Signal{"HUP": syscall.SIGHUP, "INT": syscall.SIGINT, "TERM": syscall.SIGTERM}[l.event]
	tmux := func(args ...string) { // its server ends when the job has ended
		if err := exec.Command("tmux", append([]string{"-L", l.tmux}, args...)...).Run(); err != nil {
			waitFor(l.t, "end of a job without tmux: "+err.Error(), func() bool { return l.read("status") != "" })
		}
	}
	switch {
	case l.event == "suspend":
		for stopped := 0; stopped < len(group); group = append(l.processes(), l.main()) { // launch may have started a process meanwhile
			stopped = len(group)
			to(group, syscall.SIGSTOP)
		}
		time.Sleep(long.Or(6*time.Second, 12*time.Second)) // longer than the timeout, as the test requires
		to(group, syscall.SIGCONT)
	case l.starter == "tmux" && l.event == "HUP" && l.read("status") == "":
		tmux("kill-server")
	case l.starter == "tmux" && l.event == "INT" && l.read("status") == "":
		tmux("send-keys", "C-c")
	case l.starter == "systemd" && l.event == "HUP": // SendSIGHUP=yes
		to(group, syscall.SIGTERM, syscall.SIGHUP)
	case l.starter == "srun" && signal == syscall.SIGTERM:
		to(group, syscall.SIGCONT, signal)
	case (l.starter == "systemd" || l.starter == "srun") && signal != 0:
		to(group, signal)
	case l.starter == "systemd" || l.starter == "srun": // KILL after a timeout
		first := main
		if l.starter == "srun" {
			first = group
		}
		to(first, syscall.SIGCONT, syscall.SIGTERM)
		time.Sleep(50 * time.Millisecond)
		to(append(l.processes(), l.main()), syscall.SIGKILL)
	case signal != 0:
		to(main, signal)
	case l.command == "train" && !l.mpi():
		to(main, syscall.SIGKILL)
	default:
		victim = l.rankOne()
		to([]int{victim}, map[string]syscall.Signal{"KILL": syscall.SIGKILL, "STOP": syscall.SIGSTOP}[l.event])
	}
	return victim
}

// live runs a cell.
func (c life) live(t *testing.T, binary string) {
	livesAtOnce <- struct{}{}
	defer func() { <-livesAtOnce }()
	l := begin(t, c, binary)
	statuses, goesOn, says := c.outcome()
	l.reach()
	victim := l.fire()
	before, seen := l.read("m.jsonl"), l.lines()
	said := func() string { return l.read("err") + l.read("out") }
	hungUp := l.starter == "tmux" && l.event == "HUP" // the shell ends with it
	ended := func() bool { return l.read("status") != "" || hungUp && len(l.processes()) == 0 }
	if goesOn {
		again := regexp.MustCompile(says)
		waitFor(t, "new attempt", func() bool { return says == "" || again.MatchString(said()) || ended() })
		waitFor(t, "steps after the event", func() bool {
			now := l.read("m.jsonl") // a new attempt may truncate the file
			return l.lines() > seen+1 || strings.Contains(now, "\n") && !strings.HasPrefix(before, now) && !strings.HasPrefix(now, before) || ended()
		})
		require.False(t, ended(), "it does not go on: %s", said())
		if l.starter == "mpirun.openmpi" || l.starter == "mpirun.mpich" {
			statuses = nil
		} else {
			statuses = []int{cli.ExitInterrupted}
		}
		require.NoError(t, syscall.Kill(l.main(), syscall.SIGTERM))
	}
	waitFor(t, "end", ended)
	status, err := strconv.Atoi(strings.TrimSpace(l.read("status")))
	if err != nil && hungUp {
		status, err = cli.ExitInterrupted, nil
	}
	require.NoError(t, err)
	if statuses != nil {
		require.Contains(t, statuses, status, said())
	}
	if !goesOn && says != "" && status != cli.ExitDone {
		if strings.Contains(says, "%d") {
			says = fmt.Sprintf(says, victim)
		}
		require.Regexp(t, says, said())
	}
	if l.mpi() && c.event == "STOP" {
		if victim > 0 {
			_ = syscall.Kill(victim, syscall.SIGKILL) // the launcher may not have killed it
		}
	}
	// Spillway's shared memory has no name and is freed with the processes that map it.
	waitFor(t, "end of every process", l.over)
	if !l.mpi() { // MPI has files there
		left, err := os.ReadDir(l.path("tmp"))
		require.NoError(t, err)
		require.Empty(t, left, "temporary files are left")
	}
	l.resume(status)
}

// resume continues for a step and compares with an undisturbed run. Files of an interrupted save
// are removed.
func (l *living) resume(status int) {
	t, saved := l.t, 0
	if _, err := os.Stat(l.path("ck")); err == nil {
		saved, _ = newest(t, l.path("ck"))
	}
	if kept := status == cli.ExitInterrupted && (l.moment == "step" || l.moment == "save" || l.moment == "eval"); kept {
		require.Positive(t, saved, "the run was interrupted, and nothing was saved")
	}
	c := livesConfig(2)
	c.Checkpoint, c.Resume, c.Steps = l.path("ck"), true, saved+1
	tr, err := spillway.New(context.Background(), c)
	require.NoError(t, err)
	defer tr.Close()
	require.Equal(t, saved, tr.Done())
	require.NoError(t, tr.Run(context.Background(), nil))
	got, err := tr.ParamsSHA256()
	require.NoError(t, err)
	require.Equal(t, untouched(t, saved+1), got, "the bits after step %d", saved+1)
	entries, err := os.ReadDir(l.path("ck"))
	require.NoError(t, err)
	for _, e := range entries {
		require.Regexp(t, `^(step-\d+|\.spillway-(marks|lock))$`, e.Name(), "what a save left")
	}
}

func livesConfig(ranks int) spillway.Config {
	c := spillway.Default()
	c.Model, c.Data, c.Batch, c.Seq, c.Reproducible, c.Ranks, c.Accum, c.Threads = testdata+"/gpt2", testdata+"/text.bin", 1, 16, true, ranks, 2/ranks, 1
	return c
}

// undisturbed is a run without events, and its parameters after each step.
var undisturbed struct {
	sync.Mutex
	run  *spillway.Trainer
	sums []string
}

func untouched(t *testing.T, step int) string {
	u := &undisturbed
	u.Lock()
	defer u.Unlock()
	if u.run == nil {
		c := livesConfig(1)
		c.Steps = 1 << 30
		var err error
		u.run, err = spillway.New(context.Background(), c)
		require.NoError(t, err)
	}
	for len(u.sums) < step {
		_, err := u.run.Step(context.Background())
		require.NoError(t, err)
		sum, err := u.run.ParamsSHA256()
		require.NoError(t, err)
		u.sums = append(u.sums, sum)
	}
	return u.sums[step-1]
}

// testSeed returns SPILLWAY_TEST_SEED, or a random seed.
func testSeed(t *testing.T) uint64 {
	given := os.Getenv("SPILLWAY_TEST_SEED")
	if given == "" {
		return uint64(time.Now().UnixNano())
	}
	seed, err := strconv.ParseUint(given, 10, 64)
	require.NoError(t, err)
	return seed
}

// For every starter, event and moment the exit status must be right and the message must name the
// cause. No process or file may be left, and --resume must give the bits of an undisturbed run.
func TestProcessLives(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	binary, err := built()
	require.NoError(t, err)
	all, impossible := allLives()
	seed := testSeed(t)
	cells := long.Draw(seed, long.Of(8, 150, len(all)), all)
	rand.New(rand.NewPCG(seed, 1)).Shuffle(len(cells), func(i, j int) { cells[i], cells[j] = cells[j], cells[i] })
	t.Logf("%d of %d cells, SPILLWAY_TEST_SEED=%d; there are none: %v; not run: srun itself, which needs Slurm", len(cells), len(all), seed, impossible)
	t.Cleanup(func() {
		if undisturbed.run != nil {
			_ = undisturbed.run.Close()
		}
	})
	for _, c := range cells {
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			for _, program := range []string{"tmux", "mpirun.openmpi", "mpirun.mpich"} {
				if _, err := exec.LookPath(program); c.starter == program && err != nil {
					t.Skipf("not run: %s is not installed", program)
				}
			}
			c.live(t, binary)
		})
	}
}
