//go:build linux

package shm_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/shm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/algotest"
	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
)

// A process of a job is this test binary. These variables set its rank and its part.
const rankVar, partVar = "SPILLWAY_TEST_SHM_RANK", "SPILLWAY_TEST_SHM_PART"

func TestMain(m *testing.M) {
	if s := os.Getenv(rankVar); s != "" {
		rank, _ := strconv.Atoi(s)
		if err := runPart(os.Getenv(partVar), rank); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		fmt.Println("done")
		os.Exit(0)
	}
	ownworld.ManyAtOnce()
	os.Exit(m.Run())
}

// runPart runs a rank's part in its process. Its files from descriptor 3 are the job's.
func runPart(part string, rank int) error {
	world, _ := strconv.Atoi(os.Getenv("SPILLWAY_TEST_SHM_WORLD"))
	var files []*os.File
	for i := range world + 1 {
		files = append(files, os.NewFile(uintptr(3+i), "job"))
	}
	j, err := shm.Attach(files)
	if err != nil {
		return err
	}
	o := shm.Options{Timeout: time.Minute, Warn: func(s string) { fmt.Println("warning:", s) }}
	if s := os.Getenv("SPILLWAY_TEST_SHM_TIMEOUT"); s != "" {
		o.Timeout, _ = time.ParseDuration(s)
	}
	mesh := []graph.Axis{{Name: "data", Size: world}}
	if part == "mesh" {
		mesh = []graph.Axis{{Name: "replicate", Size: world / 2}, {Name: "shard", Size: 2}}
	}
	w, err := j.Join(mesh, []int{rank}, o)
	if err != nil {
		return err
	}
	r, err := newRank(w, rank)
	if err != nil {
		return err
	}
	if err := parts[part](r); err != nil {
		return err
	}
	return errors.Join(r.ctx.Close(), w.Close())
}

// rank is one rank of a job with an arena and a stream.
type rank struct {
	world  *shm.World
	g      comm.Group
	ctx    *cpu.Context
	arena  device.Arena
	stream device.Stream
}

const arenaBytes = 1 << 20

func newRank(w *shm.World, i int) (*rank, error) {
	r := &rank{world: w, ctx: cpu.New(i, cpu.Options{Map: w.Map(i)})}
	w.OnError(r.ctx.Abort)
	r.ctx.OnError(w.Abort)
	var errs [3]error
	r.arena, errs[0] = r.ctx.Alloc(graph.Device, arenaBytes)
	r.stream, errs[1] = r.ctx.NewStream(graph.Comm)
	r.g, errs[2] = groupOf(w, i, -1)
	return r, errors.Join(errs[:]...)
}

func groupOf(w *shm.World, rank, axis int) (comm.Group, error) {
	all, err := w.Groups(rank)
	return all[axis], err
}

func (r *rank) ptr(off, n int64) device.Ptr { return device.Ptr{Arena: r.arena, Off: off, Len: n} }

func (r *rank) floats(off, n int64) []float32 {
	v, err := cpu.Slice[float32](r.ptr(off, 4*n))
	if err != nil {
		panic(err)
	}
	return v
}

// do runs operations one after another.
func (r *rank) do(bind ...func() (device.Kernel, error)) error {
	for _, b := range bind {
		k, err := b()
		if err != nil {
			return err
		}
		if err := r.stream.Launch(k); err != nil {
			return err
		}
	}
	return r.stream.Sync()
}

func (r *rank) allReduce(n int64) error {
	return r.do(func() (device.Kernel, error) { return r.g.AllReduce("ar", r.ptr(0, 4*n), graph.F32, graph.SumTree) })
}

var parts = map[string]func(*rank) error{
	"bits":       func(r *rank) error { return errors.Join(bits(r), algotest.CheckLeaves(r.g, r.arena, r.stream)) },
	"algorithms": func(r *rank) error { return algotest.Check(r.g, r.arena, r.stream) },
	"mesh": func(r *rank) error {
		for axis := range 2 {
			g, err := groupOf(r.world, r.ctx.Rank(), axis)
			if err != nil {
				return err
			}
			r.floats(0, 1)[0] = float32(r.ctx.Rank())
			if err := r.do(func() (device.Kernel, error) { return g.AllReduce("ar", r.ptr(0, 4), graph.F32, graph.SumTree) }); err != nil {
				return err
			}
			fmt.Println("sum", axis, r.floats(0, 1)[0])
		}
		return nil
	},
	"loop": func(r *rank) error {
		fmt.Println("started")
		for {
			if err := r.allReduce(1000); err != nil {
				return err
			}
		}
	},
	"mismatch": func(r *rank) error {
		if err := r.allReduce(10); err != nil {
			return err
		}
		return r.allReduce(10 + int64(r.ctx.Rank()))
	},
	"early": func(r *rank) error { // rank 1 ends before the others
		if r.ctx.Rank() == 1 {
			return nil
		}
		return r.allReduce(10)
	},
	"idle": func(r *rank) error { // rank 0 alone is late
		if err := r.allReduce(10); err != nil {
			return err
		}
		share, err := algotest.Waiting(cpuTime, func() error {
			if r.ctx.Rank() == 0 {
				time.Sleep(time.Second)
			}
			return r.allReduce(10)
		})
		fmt.Println("share", share)
		return err
	},
	"pause": func(r *rank) error { // a hundred operations over more than the timeout
		fmt.Println("started")
		for range 100 {
			time.Sleep(20 * time.Millisecond)
			if err := r.allReduce(10); err != nil {
				return err
			}
		}
		return nil
	},
	"abort": func(r *rank) error {
		if r.ctx.Rank() == 1 {
			r.world.Abort(errors.New("the disk is full"))
		}
		return r.allReduce(10)
	},
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func equal(what string, got, want []float32) error {
	for i := range want {
		if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
			return fmt.Errorf("%s: element %d is %v, want %v", what, i, got[i], want[i])
		}
	}
	return nil
}

// bits runs every operation on random numbers and compares the results with the definition.
func bits(r *rank) error {
	self, w := r.g.Rank(), r.g.Size()
	for _, n := range []int64{1, 17, 3000} {
		full := n * int64(w)
		var all [][]float32
		for i := range w {
			all = append(all, algotest.Numbers(i, 0, full))
		}
		sum := make([]float32, full)
		comm.NewAdder[float32](w).Sum(sum, all, false)
		a, b := r.floats(0, full), r.floats(4*full, full)
		part := func(v []float32, i int) []float32 { return v[int64(i)*n : int64(i+1)*n] }
		steps := []struct {
			name  string
			bind  func() (device.Kernel, error)
			check func() error
		}{
			{"all-reduce", func() (device.Kernel, error) { return r.g.AllReduce("x", r.ptr(0, 4*full), graph.F32, graph.SumTree) },
				func() error { return equal("all-reduce", a, sum) }},
			{"reduce-scatter", func() (device.Kernel, error) {
				return r.g.ReduceScatter("x", r.ptr(0, 4*full), r.ptr(4*full, 4*n), graph.F32, graph.SumTree, false)
			}, func() error { return equal("reduce-scatter", b[:n], part(sum, self)) }},
			{"all-gather in place", func() (device.Kernel, error) {
				return r.g.AllGather("x", r.ptr(int64(self)*4*n, 4*n), r.ptr(0, 4*full), graph.F32)
			}, func() error {
				for i := range w {
					if err := equal("all-gather", part(a, i), part(all[i], i)); err != nil {
						return err
					}
				}
				return nil
			}},
			{"broadcast", func() (device.Kernel, error) { return r.g.Broadcast("x", r.ptr(0, 4*full), graph.F32, w-1) },
				func() error { return equal("broadcast", a, all[w-1]) }},
			{"all-to-all", func() (device.Kernel, error) {
				return r.g.AllToAll("x", r.ptr(0, 4*full), r.ptr(4*full, 4*full), graph.F32)
			}, func() error {
				for i := range w {
					if err := equal("all-to-all", part(b, i), part(all[i], self)); err != nil {
						return err
					}
				}
				return nil
			}},
		}
		for _, s := range steps {
			copy(a, all[self])
			if err := r.do(func() (device.Kernel, error) { return r.g.Barrier("b") }, s.bind, func() (device.Kernel, error) { return r.g.Barrier("b") }); err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			if err := s.check(); err != nil {
				return err
			}
		}
		if err := r.sendAround(n); err != nil {
			return err
		}
	}
	return nil
}

// sendAround passes a buffer from each rank to the next. The first rank receives last.
func (r *rank) sendAround(n int64) error {
	self, w := r.g.Rank(), r.g.Size()
	if w == 1 {
		return nil
	}
	if self == 0 {
		copy(r.floats(0, n), algotest.Numbers(9, 0, n))
	}
	send := func() (device.Kernel, error) { return r.g.Send("s", r.ptr(0, 4*n), graph.F32, (self+1)%w) }
	recv := func() (device.Kernel, error) { return r.g.Recv("r", r.ptr(0, 4*n), graph.F32, (self+w-1)%w) }
	bind := []func() (device.Kernel, error){recv, send}
	if self == 0 {
		bind = []func() (device.Kernel, error){send, recv}
	}
	if err := r.do(bind...); err != nil {
		return err
	}
	return equal("send", r.floats(0, n), algotest.Numbers(9, 0, n))
}

// job holds the processes of a test.
type job struct {
	t    *testing.T
	shm  *shm.Job
	cmds []*exec.Cmd
	out  []*bufio.Reader
}

func start(t *testing.T, world int, part string, timeout time.Duration) *job {
	s, err := shm.Create(world)
	require.NoError(t, err)
	j := &job{t: t, shm: s}
	self, err := os.Executable()
	require.NoError(t, err)
	for r := range world {
		cmd := exec.Command(self)
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", rankVar, r), partVar+"="+part,
			fmt.Sprintf("SPILLWAY_TEST_SHM_WORLD=%d", world), "SPILLWAY_TEST_SHM_TIMEOUT="+timeout.String())
		cmd.ExtraFiles, cmd.Stderr = s.Files(), os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		pipe, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		j.cmds, j.out = append(j.cmds, cmd), append(j.out, bufio.NewReader(pipe))
	}
	t.Cleanup(func() {
		for _, c := range j.cmds {
			_ = c.Process.Kill()
			_ = c.Wait()
		}
		require.NoError(t, s.Close())
	})
	return j
}

// line returns the next line of a rank's output.
func (j *job) line(rank int) string {
	s, err := j.out[rank].ReadString('\n')
	require.NoError(j.t, err)
	return strings.TrimSpace(s)
}

// rest returns the remaining output of a rank, up to its end.
func (j *job) rest(rank int) string {
	b, err := io.ReadAll(j.out[rank])
	require.NoError(j.t, err)
	return strings.TrimSpace(string(b))
}

func (j *job) signal(rank int, s syscall.Signal) {
	require.NoError(j.t, j.cmds[rank].Process.Signal(s))
}

func TestProcessesGiveTheBitsOfTheDefinition(t *testing.T) {
	for _, world := range []int{1, 2, 3, 4, 8} {
		t.Run(fmt.Sprint(world), func(t *testing.T) {
			j := start(t, world, "bits", time.Minute)
			for r := range world {
				require.Equal(t, "done", j.rest(r), "rank %d", r)
			}
			require.Empty(t, j.shm.Failure())
		})
	}
}

func TestAlgorithmsKeepTheBits(t *testing.T) {
	for _, world := range []int{3, 4} {
		j := start(t, world, "algorithms", time.Minute)
		for r := range world {
			require.Equal(t, "done", j.rest(r), "rank %d", r)
		}
	}
}

func TestGroupsAlongAMesh(t *testing.T) {
	j := start(t, 4, "mesh", time.Minute)
	for r, want := range []string{"sum 0 2\nsum 1 1", "sum 0 4\nsum 1 1", "sum 0 2\nsum 1 5", "sum 0 4\nsum 1 5"} {
		require.Equal(t, want+"\ndone", j.rest(r))
	}
}

func TestAMismatchIsRefusedOnTheSpot(t *testing.T) {
	j := start(t, 3, "mismatch", time.Minute)
	for r := range 3 {
		require.Regexp(t, `ranks disagree in the world group at call 2: rank 0 runs all_reduce of 40 bytes of f32 \("ar"\), rank [12] runs all_reduce of 4[48] bytes`, j.rest(r))
	}
}

func TestAKilledProcessEndsTheJob(t *testing.T) {
	for victim := range 3 {
		t.Run(fmt.Sprint(victim), func(t *testing.T) {
			j := start(t, 3, "loop", time.Minute)
			for r := range 3 {
				require.Equal(t, "started", j.line(r))
			}
			time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond) // at a random moment
			j.signal(victim, syscall.SIGKILL)
			for r := range 3 {
				if r != victim {
					require.Regexp(t, fmt.Sprintf(`^error: .*rank lost: rank %d \(host .*, process %d\) died`, victim, j.cmds[victim].Process.Pid), j.rest(r))
				}
			}
			require.Contains(t, j.shm.Flight(3), `all_reduce "ar", call`)
		})
	}
}

func TestAStoppedProcessIsNamedAndEndsTheJob(t *testing.T) {
	t.Parallel()
	for victim := range 2 {
		t.Run(fmt.Sprint(victim), func(t *testing.T) {
			t.Parallel()
			j := start(t, 2, "loop", 3*time.Second)
			for r := range 2 {
				require.Equal(t, "started", j.line(r))
			}
			j.signal(victim, syscall.SIGSTOP)
			began := time.Now()
			warning := j.line(1 - victim)
			said := regexp.MustCompile(fmt.Sprintf(`^warning: rank %d .* gives no sign of life.*; the job ends in (\S+) unless it comes back`, victim)).FindStringSubmatch(warning)
			require.NotNil(t, said, warning)
			left, err := time.ParseDuration(said[1])
			require.NoError(t, err)
			// By the watchdog's clock, which leaves out time in which this machine did not run it.
			require.Greater(t, left, time.Second, "named within 2 s of the 3 s")
			named := time.Since(began)
			require.Regexp(t, fmt.Sprintf(`^error: .*timeout: .*rank %d .*(gave no sign of life for 3s|did not (arrive|finish) within 3s)`, victim), j.rest(1-victim))
			t.Logf("named after %v, ended after %v", named, time.Since(began))
			j.signal(victim, syscall.SIGCONT)
			require.Contains(t, j.rest(victim), fmt.Sprintf("rank %d", victim), "it learns of its own end")
		})
	}
}

func TestAPauseOfTheWholeJobGoesOn(t *testing.T) {
	t.Parallel()
	j := start(t, 2, "pause", 1500*time.Millisecond)
	for r := range 2 {
		require.Equal(t, "started", j.line(r))
	}
	for r := range 2 {
		j.signal(r, syscall.SIGSTOP)
	}
	time.Sleep(2500 * time.Millisecond) // longer than the timeout
	for r := range 2 {
		j.signal(r, syscall.SIGCONT)
	}
	for r := range 2 {
		require.Equal(t, "done", j.rest(r))
	}
}

func TestARankThatEndsBeforeTheOthers(t *testing.T) {
	j := start(t, 2, "early", time.Minute)
	require.Equal(t, "done", j.rest(1))
	require.Regexp(t, `rank lost: rank 1 .*has ended; rank 0 waits in all_reduce "ar" \(call 1\) of the world group`, j.rest(0))
}

func TestAnAbortReachesEveryProcess(t *testing.T) {
	j := start(t, 3, "abort", time.Minute)
	for r := range 3 {
		require.Contains(t, j.rest(r), "aborted: the disk is full")
	}
}

func TestAWaitingRankUsesNoCore(t *testing.T) {
	t.Parallel()
	j := start(t, 3, "idle", time.Minute)
	for r := range 3 {
		out := j.rest(r)
		var share float64
		_, err := fmt.Sscanf(out, "share %g", &share)
		require.NoError(t, err, out)
		t.Logf("rank %d: %.3g of a core", r, share)
		if !algotest.Race { // the detector's overhead would be included
			require.LessOrEqual(t, share, 0.1, "rank %d", r)
		}
	}
}

// Several ranks of one process use the same shared memory.
func TestRanksOfOneProcess(t *testing.T) {
	j, err := shm.Create(1)
	require.NoError(t, err)
	w, err := j.Join(nil, []int{0, 1}, shm.Options{})
	require.EqualError(t, err, "shm: a mesh of 1 ranks and 0 axes, want the job's 2 ranks and at most 4 axes")
	require.Nil(t, w)
	mesh := []graph.Axis{{Name: "pipeline", Size: 1}, {Name: "tensor", Size: 2}, {Name: "replicate", Size: 1}, {Name: "shard", Size: 1}}
	w, err = j.Join(mesh, []int{0, 1}, shm.Options{})
	require.NoError(t, err)
	_, err = j.Join(mesh, []int{0, 1}, shm.Options{})
	require.EqualError(t, err, "shm: rank 0 has joined the job already")
	_, err = j.Join(mesh, []int{1}, shm.Options{})
	require.EqualError(t, err, "shared memory: this process runs 1 ranks, another one of the job 2")
	_, err = j.Join(mesh, nil, shm.Options{})
	require.EqualError(t, err, "shared memory: 1 processes of 0 ranks, want 1 to 256 ranks in all")
	processes, each := j.Processes()
	require.Equal(t, [2]int{1, 2}, [2]int{processes, each})
	errs := make(chan error, 2)
	for i := range 2 {
		r, err := newRank(w, i)
		require.NoError(t, err)
		go func() { errs <- errors.Join(bits(r), r.ctx.Close()) }()
	}
	require.NoError(t, <-errs)
	require.NoError(t, <-errs)
	require.NoError(t, w.Close())
	require.NoError(t, j.Close())
}

func TestWhatIsNotAJobIsRefused(t *testing.T) {
	_, err := shm.Create(0)
	require.EqualError(t, err, "shared memory: 0 ranks, want 1 to 256")
	f, err := os.CreateTemp(t.TempDir(), "")
	require.NoError(t, err)
	defer f.Close()
	_, err = shm.Attach([]*os.File{f, f})
	require.ErrorContains(t, err, "the job's file has 0 bytes")
	_, err = shm.Attach(nil)
	require.ErrorContains(t, err, "0 files")

	j, err := shm.Create(1)
	require.NoError(t, err)
	w, err := j.Join(nil, []int{0}, shm.Options{})
	require.NoError(t, err)
	c := cpu.New(0, cpu.Options{})
	a, err := c.Alloc(graph.Device, 64)
	require.NoError(t, err)
	g, err := groupOf(w, 0, -1)
	require.NoError(t, err)
	_, err = g.AllReduce("x", device.Ptr{Arena: a, Len: 64}, graph.F32, graph.SumTree)
	require.EqualError(t, err, `rank 0: all_reduce "x": the operand is not in the rank's shared memory`)
	require.NoError(t, errors.Join(c.Close(), w.Close(), j.Close()))
}
