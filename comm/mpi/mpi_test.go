//go:build linux

package mpi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/dl"
	"github.com/spillway-ml/spillway/internal/testkit/algotest"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
)

// A process of a job is this test binary, started by mpirun with this variable set.
const partVar = "SPILLWAY_TEST_MPI_PART"

func TestMain(m *testing.M) {
	closeGrace = 3 * time.Second
	if part := os.Getenv(partVar); part != "" {
		if err := runPart(part); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	ownworld.ManyAtOnce()
	os.Exit(m.Run())
}

func runPart(part string) error {
	env, err := cluster.Read(os.Getenv)
	if err != nil {
		return err
	}
	order := []Family{ABI, MPICH}
	if env.Source == cluster.OpenMPI {
		order = []Family{OpenMPI}
	}
	if part == "pieces" { // as if a message could have a thousand bytes
		maxMessage, maxCount, shortBytes, part = 1000, 1000, 100, "bits"
	}
	p, err := Start(order, env.Rank, env.World, 0)
	if err != nil {
		return err
	}
	mesh := []graph.Axis{{Name: "data", Size: env.World}}
	if part == "mesh" {
		mesh = []graph.Axis{{Name: "replicate", Size: env.World / 2}, {Name: "shard", Size: 2}}
	}
	timeout := time.Minute
	if part == "stuck" {
		timeout = 5 * time.Second
	}
	messages := part == "messages"
	if messages {
		shortBytes, part = 100, "bits"
	}
	each := 1
	if part == "ranks" {
		mesh[0].Size, each, part = 3*env.World, 3, "bits"
	}
	w, err := p.Join(mesh, each, Options{Timeout: timeout, Messages: messages, Warn: func(s string) { fmt.Println("warning:", s) }})
	if err != nil {
		return err
	}
	errs := make(chan error, each)
	for i := range each {
		r, err := newRank(w, w.first+i)
		if err != nil {
			return err
		}
		r.process = p
		go func() { errs <- errors.Join(parts[part](r), r.ctx.Close()) }()
	}
	for range each {
		err = errors.Join(err, <-errs)
	}
	err = errors.Join(err, w.Close())
	closed := p.Close()
	var unended *UnendedError
	if errors.As(closed, &unended) { // may happen on a slow machine; the tested part has run
		fmt.Println("warning:", unended)
		closed = nil
	}
	return errors.Join(err, closed)
}

// rank is one rank of a job with an arena and a stream.
type rank struct {
	process *Process
	world   *World
	g       comm.Group
	ctx     *cpu.Context
	arena   device.Arena
	stream  device.Stream
}

// arenaBytes is enough for two buffers of the longest test.
const arenaBytes = 5 << 20

func newRank(w *World, i int) (*rank, error) {
	r := &rank{world: w, ctx: cpu.New(i, cpu.Options{})}
	w.OnError(r.ctx.Abort)
	r.ctx.OnError(w.Abort)
	var errs [3]error
	r.arena, errs[0] = r.ctx.Alloc(graph.Device, arenaBytes)
	r.stream, errs[1] = r.ctx.NewStream(graph.Comm)
	groups, err := w.Groups(i)
	errs[2] = err
	r.g = groups[-1]
	return r, errors.Join(errs[:]...)
}

func (r *rank) ptr(off, n int64) device.Ptr { return device.Ptr{Arena: r.arena, Off: off, Len: n} }

func (r *rank) floats(off, n int64) []float32 {
	v, err := cpu.Slice[float32](r.ptr(off, 4*n))
	if err != nil {
		panic(err)
	}
	return v
}

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
		groups, err := r.world.Groups(r.world.first)
		if err != nil {
			return err
		}
		for axis, want := range [][]float32{{2, 4, 2, 4}, {1, 1, 5, 5}} {
			r.floats(0, 1)[0] = float32(r.world.first)
			if err := r.do(func() (device.Kernel, error) {
				return groups[axis].AllReduce("ar", r.ptr(0, 4), graph.F32, graph.SumTree)
			}); err != nil {
				return err
			}
			if got := r.floats(0, 1)[0]; got != want[r.world.first] {
				return fmt.Errorf("axis %d: %v, want %v", axis, got, want[r.world.first])
			}
		}
		return nil
	},
	"mismatch": func(r *rank) error {
		if err := r.allReduce(10); err != nil {
			return err
		}
		return r.allReduce(10 + int64(r.world.first))
	},
	"mismatch of length": func(r *rank) error { // one's bytes go with its headers, the other's do not
		return r.allReduce([]int64{10, 1 << 20}[r.world.first])
	},
	"mismatch of kind": func(r *rank) error { // one sends nothing but its header
		if r.world.first == 1 {
			return r.do(func() (device.Kernel, error) { return r.g.Barrier("b") })
		}
		return r.allReduce(10)
	},
	"late": func(r *rank) error { // the other comes when this one's arena is gone
		gather := func() error {
			return r.do(func() (device.Kernel, error) {
				return r.g.AllGather("ag", r.ptr(int64(r.world.first)<<12, 1<<12), r.ptr(0, 2<<12), graph.F32)
			})
		}
		if r.world.first == 1 {
			ended := make(chan struct{})
			r.world.OnError(func(error) { close(ended) })
			<-ended
			time.Sleep(40 * time.Millisecond)
			err := gather()
			time.Sleep(time.Second) // some launchers kill all processes when one exits with an error
			return err
		}
		time.AfterFunc(20*time.Millisecond, func() { r.world.Abort(errors.New("the disk is full")) })
		err := errors.Join(gather(), r.ctx.Close())
		time.Sleep(300 * time.Millisecond)
		fmt.Println("rank 0 lives")
		return err
	},
	"stuck": func(r *rank) error { // rank 1 does not come before the job has ended
		if r.world.first == 1 {
			ended := make(chan struct{})
			r.world.OnError(func(error) { close(ended) })
			<-ended
		}
		return r.allReduce(10)
	},
	"abort": func(r *rank) error {
		if r.world.first == 1 {
			r.world.Abort(errors.New("the disk is full"))
		}
		return r.allReduce(10)
	},
	"absent": func(r *rank) error { // rank 1 does not come to the end, until its launcher ends it
		err := r.allReduce(10)
		if r.world.first == 1 {
			time.Sleep(time.Minute)
		}
		return err
	},
	"idle": func(r *rank) error { // rank 0 alone is late
		if err := r.allReduce(10); err != nil {
			return err
		}
		share, err := algotest.Waiting(cpuTime, func() error {
			if r.world.first == 0 {
				time.Sleep(time.Second)
			}
			return r.allReduce(10)
		})
		if share > 0.1 {
			err = errors.Join(err, fmt.Errorf("rank %d used %.3g of a core while it waited", r.world.first, share))
		}
		return err
	},
	"signals": func(r *rank) error { // as a launcher that has lost a rank sends them, to every thread
		list, err := offStack()
		if err != nil {
			return err
		}
		if len(list) > 0 {
			return fmt.Errorf("the handlers of signals %v do not run on the signal stack", list)
		}
		hangup := make(chan os.Signal, 1)
		signal.Notify(hangup, syscall.SIGHUP)
		defer signal.Stop(hangup)
		if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
			return err
		}
		<-hangup // the program handles this signal, not the library
		sent := 0
		for range 20 {
			threads, err := os.ReadDir("/proc/self/task")
			if err != nil {
				return err
			}
			for _, thread := range threads {
				id, err := strconv.Atoi(thread.Name())
				if err != nil {
					return err
				}
				if unix.Tgkill(os.Getpid(), id, unix.SIGUSR1) == nil { // otherwise the thread has ended
					sent++
				}
			}
			if err := r.allReduce(10); err != nil {
				return err
			}
		}
		if sent < 20 {
			return fmt.Errorf("%d signals", sent)
		}
		return nil
	},
	"stream": func(r *rank) error { // a megabyte there and back
		text := bytes.Repeat([]byte("spillway"), 1<<17)
		s, err := r.process.Stream(1 - r.world.first)
		if err != nil {
			return err
		}
		got := make([]byte, len(text))
		if r.world.first == 0 {
			if _, err := s.Write(text); err != nil {
				return err
			}
		}
		if _, err := io.ReadFull(s, got); err != nil {
			return err
		}
		if r.world.first == 1 {
			if _, err := s.Write(got); err != nil {
				return err
			}
		}
		if !bytes.Equal(got, text) {
			return errors.New("not what was sent")
		}
		return s.Close()
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
	lengths := []int64{1, 17, 500, 3000, 20_000} // the data of the last is sent apart from its header
	if w == 2 {
		lengths = append(lengths, 300_000) // a sum of more than one chunk
	}
	for _, n := range lengths {
		full := n * int64(w)
		var all [][]float32
		for i := range w {
			all = append(all, algotest.Numbers(i, 0, full))
		}
		sum := make([]float32, full)
		comm.NewAdder[float32](w).Sum(sum, all, false)
		a, b := r.floats(0, full), r.floats(4*full, full)
		part := func(v []float32, i int) []float32 { return v[int64(i)*n : int64(i+1)*n] }
		parts := func(what string, got []float32, want func(i int) []float32) error {
			for i := range w {
				if err := equal(what, part(got, i), want(i)); err != nil {
					return err
				}
			}
			return nil
		}
		old := algotest.Numbers(99, 0, n)
		accumulated := make([]float32, n)
		for i := range accumulated {
			accumulated[i] = old[i] + part(sum, self)[i]
		}
		steps := []struct {
			name  string
			bind  func() (device.Kernel, error)
			check func() error
		}{
			{"all-reduce", func() (device.Kernel, error) { return r.g.AllReduce("x", r.ptr(0, 4*full), graph.F32, graph.SumTree) },
				func() error { return equal("all-reduce", a, sum) }},
			{"reduce-scatter", func() (device.Kernel, error) {
				return r.g.ReduceScatter("x", r.ptr(0, 4*full), r.ptr(4*full, 4*n), graph.F32, graph.SumTree, true)
			}, func() error { return equal("reduce-scatter", b[:n], accumulated) }},
			{"reduce-scatter in place", func() (device.Kernel, error) {
				return r.g.ReduceScatter("x", r.ptr(0, 4*full), r.ptr(int64(self)*4*n, 4*n), graph.F32, graph.SumTree, false)
			}, func() error { return equal("reduce-scatter in place", part(a, self), part(sum, self)) }},
			{"all-gather in place", func() (device.Kernel, error) {
				return r.g.AllGather("x", r.ptr(int64(self)*4*n, 4*n), r.ptr(0, 4*full), graph.F32)
			}, func() error { return parts("all-gather", a, func(i int) []float32 { return part(all[i], i) }) }},
			{"broadcast", func() (device.Kernel, error) { return r.g.Broadcast("x", r.ptr(0, 4*full), graph.F32, w-1) },
				func() error { return equal("broadcast", a, all[w-1]) }},
			{"all-to-all", func() (device.Kernel, error) {
				return r.g.AllToAll("x", r.ptr(0, 4*full), r.ptr(4*full, 4*full), graph.F32)
			}, func() error { return parts("all-to-all", b, func(i int) []float32 { return part(all[i], self) }) }},
		}
		for _, s := range steps {
			copy(a, all[self])
			copy(b[:n], old)
			if err := r.do(s.bind); err != nil {
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

// launchers are the mpiruns to test. CI has both and sets SPILLWAY_TEST_MPI, which makes a missing
// one a failure.
var launchers = map[string][]string{"mpirun.openmpi": {"--oversubscribe"}, "mpirun.mpich": nil}

// mpirun runs a part in n processes and returns their output.
func mpirun(t *testing.T, launcher string, n int, part string, env ...string) (string, error) {
	path, err := exec.LookPath(launcher)
	if err != nil && os.Getenv("SPILLWAY_TEST_MPI") == "" {
		t.Skipf("%s is not installed", launcher)
	}
	require.NoError(t, err)
	self, err := os.Executable()
	require.NoError(t, err)
	args := append([]string{}, launchers[launcher]...)
	if os.Geteuid() == 0 && launcher == "mpirun.openmpi" {
		args = append(args, "--allow-run-as-root")
	}
	args = append(args, "-np", fmt.Sprint(n), self)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = append(append(os.Environ(), partVar+"="+part), env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// watched reports whether a job should run under the race detector. The detector sees one process,
// not the job. Another MPI library, or more processes with the same code, would show it nothing
// new.
func watched(launcher string, n int, part string) bool {
	switch part {
	case "bits":
		return !algotest.Race || n == 2
	case "idle": // the detector's overhead would count as waiting time
		return !algotest.Race
	}
	return !algotest.Race || launcher == "mpirun.openmpi"
}

func TestOverMPI(t *testing.T) {
	type job struct {
		n    int
		part string
	}
	jobs := []job{{4, "mesh"}, {2, "stream"}, {2, "pieces"}, {3, "pieces"}, {3, "messages"}, {4, "algorithms"}, {2, "ranks"}, {2, "signals"}, {3, "idle"}}
	for n := range 4 {
		jobs = append(jobs, job{n + 1, "bits"})
	}
	for k, launcher := range slices.Sorted(maps.Keys(launchers)) {
		for i, j := range jobs {
			if !long.On() && i%2 != k { // each part with one of them
				continue
			}
			if !watched(launcher, j.n, j.part) {
				continue
			}
			t.Run(fmt.Sprint(launcher, "/", j.part, "/", j.n), func(t *testing.T) {
				t.Parallel()
				out, err := mpirun(t, launcher, j.n, j.part)
				require.NoError(t, err, out)
			})
		}
	}
}

func TestFailuresAreNamed(t *testing.T) {
	for launcher := range launchers {
		for part, want := range map[string]string{
			"mismatch":           `ranks disagree in the world group: rank [01] runs all_reduce of 4[04] bytes of f32 \("ar", call 2\), rank [01] runs all_reduce of 4[04] bytes of f32 \(call 2\)`,
			"mismatch of length": `rank [01] runs all_reduce of (40|4194304) bytes of f32 \("ar", call 1\), rank [01] runs all_reduce of (40|4194304) bytes`,
			"mismatch of kind":   `rank [01] runs (all_reduce|barrier).* \("(ar|b)", call 1\), rank [01] runs (all_reduce|barrier)`,
			"stuck":              `timeout: all_reduce "ar" \(call 1\) of the world group: rank 1 \(host .*, process \d+\) did not arrive within 5s; rank 0 waited`,
			"late":               `rank 0 lives`,
			"abort":              `aborted: the disk is full`,
		} {
			if !watched(launcher, 2, part) {
				continue
			}
			t.Run(launcher+"/"+part, func(t *testing.T) {
				t.Parallel()
				out, err := mpirun(t, launcher, 2, part)
				if strings.Contains(out, "assert (!closed) failed") {
					// When two ranks abort at the same moment, MPICH's mpiexec sometimes fails itself
					// and loses their output.
					out, err = mpirun(t, launcher, 2, part)
				}
				require.Error(t, err)
				require.Regexp(t, want, out)
			})
		}
	}
}

func TestALibraryOfAnotherLauncherIsRefused(t *testing.T) {
	for launcher, other := range map[string]string{"mpirun.openmpi": "libmpich.so.12", "mpirun.mpich": "libmpi.so.40"} {
		t.Run(launcher, func(t *testing.T) {
			t.Parallel()
			if _, err := dl.Open(other, dl.Now|dl.Global); err != nil && os.Getenv("SPILLWAY_TEST_MPI") == "" {
				t.Skipf("%s is not installed", other)
			}
			out, err := mpirun(t, launcher, 2, "bits", LibraryVar+"="+other)
			require.Error(t, err)
			require.Contains(t, out, "says rank 0 of 1, the launcher rank", out)
		})
	}
}

// A process that does not reach MPI_Finalize does not block the others: they report which rank it
// is, and exit.
func TestWhoDoesNotComeToTheEndIsNamed(t *testing.T) {
	for launcher := range launchers {
		if !watched(launcher, 2, "absent") {
			continue
		}
		t.Run(launcher, func(t *testing.T) {
			t.Parallel()
			out, _ := mpirun(t, launcher, 2, "absent") // its status is the launcher's own matter
			require.Regexp(t, `warning: process 0 leaves MPI without its end: rank 1 \(host .*, process \d+\) did not come to the end within 3s`, out)
		})
	}
}
