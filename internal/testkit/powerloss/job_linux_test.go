package powerloss

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/comm/shm"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/launch"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/run"
)

// oneHost is the transport of a process of a job on this host.
type oneHost struct{ job *shm.Job }

func (s oneHost) Join(mesh []graph.Axis, local []int, timeout time.Duration, warn func(string)) (platform.Joined, error) {
	return s.job.Join(mesh, local, shm.Options{Timeout: timeout, Warn: warn})
}

// seen is a job's memory as another process sees it.
func seen(made *shm.Job) (*shm.Job, error) {
	var files []*os.File
	for _, f := range made.Files() {
		fd, err := syscall.Dup(int(f.Fd()))
		if err != nil {
			return nil, err
		}
		files = append(files, os.NewFile(uintptr(fd), "shared memory"))
	}
	return shm.Attach(files)
}

// pair is a stream of both directions, which holds what was not read yet.
func pair(t *testing.T) (here, there net.Conn) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	var ends [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "stream")
		ends[i], err = net.FileConn(f)
		require.NoError(t, errors.Join(err, f.Close()))
	}
	return ends[0], ends[1]
}

// together runs c as a job of c.Ranks processes, a rank each, all of them in this one:
// they share its file system, so that an operation of any may be the one that fails,
// and a kill is of all.
func together(t *testing.T, c spillway.Config) (sha string, err error) {
	made, err := shm.Create(c.Ranks)
	require.NoError(t, err)
	defer made.Close()
	var jobs []*spillway.Job
	for i := range c.Ranks {
		memory, err := seen(made)
		require.NoError(t, err)
		defer memory.Close()
		jobs = append(jobs, &spillway.Job{Process: i, Processes: c.Ranks, Locals: c.Ranks, Local: i, Transport: oneHost{memory}})
	}
	leader, others := jobs[0], jobs[1:]
	ends := make(chan error)
	for i, j := range others {
		here, there := pair(t)
		leader.Links = append(leader.Links, run.NewLink(i+1, here))
		j.Links = []*run.Link{run.NewLink(0, there)}
		go func() {
			_, err := spillway.Work(context.Background(), j, nil)
			ends <- err
		}()
	}
	c.LocalRanks = 1
	c = c.Over(leader)
	sha, err = alone(t, c)
	leader.Dismiss(err)
	for range others {
		if e := <-ends; err == nil {
			err = e
		}
	}
	return sha, err
}

// order is what a process of a real job does; it comes in orderVar.
type order struct {
	Top, Base, Checkpoint, AsyncSave string
	Process, At                      int // the At-th operation of a process fails; 0: none
	Trouble                          filesys.Trouble
}

func init() { obeys = obey }

// result is what rank 0 says of a job, and the process with the fault of its own.
type result struct {
	SHA, Err, Hit string
	At            int
}

func say(dir, name string, r result) {
	text, err := json.Marshal(r)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, name), text, 0o600)
	}
	if err != nil {
		panic(err)
	}
}

func heard(t *testing.T, dir, name string) (r result) {
	text, err := os.ReadFile(filepath.Join(dir, name))
	if errors.Is(err, os.ErrNotExist) {
		return r
	}
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &r))
	return r
}

// obey is a process of a job: a rank of a run that resumes and trains to lastStep.
func obey(text string) (status int) {
	var o order
	err := json.Unmarshal([]byte(text), &o)
	if err != nil {
		panic(err)
	}
	env, err := cluster.Read(os.Getenv)
	if err != nil {
		panic(err)
	}
	f := &filesys.Fault{FS: filesys.OS, Trouble: o.Trouble}
	if env.Rank == o.Process {
		f.At = o.At
		f.Kill = func() {
			say(o.Top, "fault", result{Hit: "killed", At: o.At})
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		defer func() {
			if hit := f.Hit(); hit != "" {
				say(o.Top, "fault", result{Hit: hit, At: f.Failed()})
			}
		}()
	}
	defer filesys.Mount(o.Base, f)()
	err = o.rank(env)
	switch {
	case err == nil:
		return 0
	case errors.Is(err, spillway.ErrLost):
		status = launch.LostStatus
	default:
		status = 1
	}
	fmt.Fprintln(os.Stderr, err)
	return status
}

// rank runs this process's.
func (o *order) rank(env cluster.Env) error {
	memory, conns, err := launch.Inherited(env)
	if err != nil {
		return err
	}
	defer memory.Close()
	j := &spillway.Job{Process: env.Rank, Processes: env.World, Locals: env.World, Local: env.Rank, Transport: oneHost{memory}}
	for i, conn := range conns {
		peer := 0
		if env.Rank == 0 {
			peer = i + 1
		}
		j.Links = append(j.Links, run.NewLink(peer, conn))
	}
	if env.Rank > 0 {
		_, err := spillway.Work(context.Background(), j, nil)
		return err
	}
	c, err := tiny(o.Top)
	if err != nil {
		return err
	}
	c.Checkpoint, c.AsyncSave, c.Zero, c.Threads = o.Checkpoint, o.AsyncSave, 3, 1
	c.Keep, c.SaveEvery, c.Steps, c.Resume = 1, 1, lastStep, true
	var warned []string
	c.Warn = func(text string) { warned = append(warned, text) }
	c = c.Over(j)
	sha, err := alone(nil, c)
	r := result{SHA: sha}
	if err != nil {
		r.Err = fmt.Sprintf("%v; %s", err, strings.Join(warned, "; "))
	}
	say(o.Top, "leader", r)
	j.Dismiss(err)
	return err
}

// launched is a trial whose runs are jobs of real processes, on the system's own disk.
type launched struct {
	*trial
	top string
}

// lay puts the disk that the runs find into its place.
func (l *launched) lay(t *testing.T) {
	require.NoError(t, os.RemoveAll(l.base))
	require.NoError(t, os.CopyFS(l.base, os.DirFS(l.base+".first")))
}

// job runs the three processes, of one of which an operation fails.
func (l *launched) job(t *testing.T, process int, trouble filesys.Trouble, n int) attempt {
	for _, name := range []string{"fault", "leader"} {
		require.NoError(t, os.RemoveAll(filepath.Join(l.top, name)))
	}
	text, err := json.Marshal(order{l.top, l.base, l.ck, l.c.AsyncSave, process, n, trouble})
	require.NoError(t, err)
	t.Setenv(orderVar, string(text))
	program, err := os.Executable()
	require.NoError(t, err)
	var out strings.Builder
	ctx, cancel := context.WithTimeout(background, 2*time.Minute)
	defer cancel()
	end, err := launch.Run(ctx, launch.Options{Ranks: l.c.Ranks, Program: program, Stdout: &out, Stderr: &out}, nil)
	require.NoError(t, err)
	require.NoError(t, ctx.Err(), "a hang: %s", &out)
	fault, leader := heard(t, l.top, "fault"), heard(t, l.top, "leader")
	a := attempt{hit: fault.Hit, at: fault.At, sha: leader.SHA, disk: filesys.OS}
	if end.Status != 0 || leader.Err != "" {
		a.told = fmt.Sprintf("status %d: %s %s; %s", end.Status, end.Lost, leader.Err, &out)
		a.err = errors.New(a.told)
	}
	if fault.Hit == "killed" {
		require.Equal(t, launch.LostStatus, end.Status, a.told)
		require.Contains(t, end.Lost, fmt.Sprintf("rank %d ", process), a.told)
		require.Contains(t, end.Lost, "killed", a.told)
	}
	return a
}

// So over three real processes, of which one alone is in trouble, or killed.
func TestFileOperationsOfAProcessFail(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	x := begin(t, 3, "off", together)
	l := &launched{trial: x, top: filepath.Dir(x.base)}
	require.NoError(t, copyOut(x.disk, x.base, x.base+".first"))
	all := os.Getenv(everyVar) != ""
	for i, trouble := range filesys.Troubles {
		for process := range l.c.Ranks {
			l.c.AsyncSave = []string{"off", "on"}[(i+process)%2]
			if all || trouble == filesys.Broken || trouble == filesys.Killed {
				l.each(t, process, trouble, all)
			}
		}
	}
}

// each lets every operation of a process fail in turn, or just one.
func (l *launched) each(t *testing.T, process int, trouble filesys.Trouble, all bool) {
	n, runs, failed := 1, 0, 0
	if !all {
		n = []int{15, 1, 55}[process] // the first of process 1 is its look at the leader's folder
	}
	for ; ; n++ {
		l.lay(t)
		a := l.job(t, process, trouble, n)
		if a.hit == "" {
			require.True(t, all, "process %d has no operation %d", process, n)
			require.NoError(t, a.err)
			break
		}
		n = a.at
		runs++
		if a.err != nil {
			failed++
		}
		l.check(t, trouble, a, false)
		if !all {
			break
		}
	}
	t.Logf("async-save %s, process %d, %s: %d runs, %d ended in an error", l.c.AsyncSave, process, trouble, runs, failed)
}

// copyOut copies what lies under dir on a file system to a folder of the system's.
func copyOut(from filesys.FS, dir, to string) error {
	list, err := from.ReadDir(dir)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	for _, e := range list {
		source, target := filepath.Join(dir, e.Name()), filepath.Join(to, e.Name())
		if e.IsDir() {
			err = copyOut(from, source, target)
		} else {
			err = copyFile(from, source, target)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func copyFile(from filesys.FS, source, target string) error {
	f, err := from.OpenFile(source, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	text := make([]byte, info.Size())
	if _, err := f.ReadAt(text, 0); err != nil && len(text) > 0 {
		return err
	}
	return os.WriteFile(target, text, 0o644)
}
