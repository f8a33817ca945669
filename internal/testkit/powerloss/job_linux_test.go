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
	"github.com/spillway-ml/spillway/internal/testkit/folders"
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
func together(t *testing.T, c spillway.Config, disk filesys.Opener) (sha string, err error) {
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
		j.In(disk)
		go func() {
			_, err := spillway.Work(context.Background(), j, nil)
			ends <- err
		}()
	}
	c.LocalRanks = 1
	c = c.Over(leader)
	sha, err = alone(t, c, disk)
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
	Trouble                          folders.Trouble
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
	f := &folders.Fault{Trouble: o.Trouble}
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
	base, err := filesys.Open(o.Base)
	if err != nil {
		panic(err)
	}
	defer base.Close()
	err = o.rank(env, folders.At(f.Folder(base)))
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
func (o *order) rank(env cluster.Env, disk filesys.Opener) error {
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
	j.In(disk)
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
	sha, err := alone(nil, c, disk)
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
func (l *launched) job(t *testing.T, process int, trouble folders.Trouble, n int) attempt {
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
	a := attempt{hit: fault.Hit, at: fault.At, sha: leader.SHA, disk: l.system(t)}
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
	require.NoError(t, copyOut(x.disk.Folder(), x.base+".first"))
	all := os.Getenv(everyVar) != ""
	for i, trouble := range folders.Troubles {
		for process := range l.c.Ranks {
			l.c.AsyncSave = []string{"off", "on"}[(i+process)%2]
			if all || trouble == folders.Broken || trouble == folders.Killed {
				l.each(t, process, trouble, all)
			}
		}
	}
}

// each lets every operation of a process fail in turn, or just one.
func (l *launched) each(t *testing.T, process int, trouble folders.Trouble, all bool) {
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

// system is the folder of the system in which the jobs work.
func (l *launched) system(t *testing.T) filesys.Folder {
	f, err := filesys.Open(l.base)
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// copyOut copies a folder to one of the system's.
func copyOut(from filesys.Folder, to string) error {
	names, err := from.Names()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	for _, name := range names {
		st, err := from.Lstat(name)
		if err != nil {
			return err
		}
		target := filepath.Join(to, name)
		if st.IsDir() {
			sub, err := from.Sub(name)
			if err == nil {
				err = copyOut(sub, target)
			}
			if err != nil {
				return err
			}
			continue
		}
		text, err := filesys.ReadFile(from, name, 1<<30)
		if err == nil {
			err = os.WriteFile(target, text, 0o644)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
