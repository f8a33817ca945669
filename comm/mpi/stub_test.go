//go:build linux

package mpi

import (
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/internal/dl"
)

// stub compiles the stub library with the given compiler flags and opens it.
func stub(t *testing.T, flags ...string) *lib {
	t.Helper()
	cc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("gcc is not installed")
	}
	path := filepath.Join(t.TempDir(), "libmpi_abi.so.0")
	out, err := exec.Command(cc, append(flags, "-shared", "-fPIC", "-o", path, "testdata/stub.c")...).CombinedOutput()
	require.NoError(t, err, string(out))
	l, err := open(nil, path)
	require.NoError(t, err)
	return l
}

// If MPI_Finalize blocks or fails, Close returns an error that says so instead of blocking. If the
// job has failed before, Close returns nil: that failure is reported already.
func TestALibraryThatDoesNotEnd(t *testing.T) {
	const late = " has not come back within 3s: another process is stuck or gone, or the library is at fault"
	for name, c := range map[string]struct {
		finalize     string
		busy, failed bool
		want         string
	}{
		"good order":        {finalize: "return 0"},
		"an error":          {finalize: "return 16", want: "mpi: MPI_Finalize: stub refuses (code 16)"},
		"a hang":            {finalize: "for (;;) pause()", want: "MPI_Finalize" + late},
		"a hang of another": {finalize: "return 0", busy: true, want: "a call of MPI" + late},
		"after a failure":   {finalize: "for (;;) pause()", failed: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e, err := startEngine(stub(t, "-DFINALIZE="+c.finalize), 0, 1)
			require.NoError(t, err)
			if c.busy {
				busy, leave := make(chan struct{}), make(chan struct{})
				defer close(leave)
				go func() { _ = e.call(func() error { close(busy); <-leave; return nil }) }()
				<-busy
			}
			p := &Process{engine: e}
			p.failed.Store(c.failed)
			err = p.Close()
			if c.want == "" {
				require.NoError(t, err)
				return
			}
			require.Equal(t, &UnendedError{Rank: 0, Why: c.want}, err)
			require.EqualError(t, err, "process 0 leaves MPI without its end: "+c.want)
		})
	}
}

// If a process never calls MPI_Init, MPI_Init in the others times out with an error.
func TestAnInitThatDoesNotComeBack(t *testing.T) {
	l := stub(t, "-DINIT=for (;;) pause()")
	_, err := startInTime(l, 1, 2, 10*time.Millisecond)
	require.ErrorIs(t, err, comm.ErrTimeout)
	require.ErrorContains(t, err, "rank 1 of 2: MPI_Init has not come back within 10ms")
}

// The stub has the ABI of MPI 5, which no available library has yet.
func TestTheABI(t *testing.T) {
	l := stub(t)
	require.Equal(t, families[ABI].name, l.name)
	_, err := startEngine(l, 1, 2)
	var world *WorldError
	require.ErrorAs(t, err, &world)
	require.Contains(t, err.Error(), "(stub 1.0) says rank 0 of 1, the launcher rank 1 of 2")
	e, err := startEngine(l, 0, 1)
	require.NoError(t, err)
	from, to := []byte("what goes round"), make([]byte, 15)
	require.NoError(t, e.do([]transfer{{peer: 0, tag: 7, mem: to}, {send: true, peer: 0, tag: 7, mem: from}}))
	require.Equal(t, from, to)
	collectivesOnTheStub(t, e)
	err = e.do([]transfer{{send: true, peer: 3, tag: 7, mem: from}})
	require.EqualError(t, err, "mpi: MPI_Isend: stub refuses (code 3)")
	e.stop <- true
	require.NoError(t, <-e.ended)
	require.ErrorIs(t, e.do(nil), errEnded)
}

// Where the library allows calls from every thread, a waiter completes its exchange itself. It
// stops when a check fails.
func TestWhoWaitsCallsTheLibrary(t *testing.T) {
	var over atomic.Bool
	from, to := []byte("what goes round"), make([]byte, 15)
	round := []transfer{{peer: 0, tag: 7, mem: to}, {send: true, peer: 0, tag: 7, mem: from}}

	e, err := startEngine(stub(t), 0, 1)
	require.NoError(t, err)
	checked := false
	done, err := e.attend(&exchange{list: round, first: 2, check: func() bool { checked = string(to) == string(from); return checked }}, &over)
	require.NoError(t, err)
	require.True(t, done)
	require.True(t, checked)
	_, err = e.attend(&exchange{list: round, first: 2, check: func() bool { return false }}, &over)
	require.ErrorIs(t, err, errRefused)
	require.ErrorIs(t, e.wait(e.start(&exchange{list: round, first: 2, check: func() bool { return false }})), errRefused)

	// An exchange that does not complete is left to the engine. Other goroutines run meanwhile.
	late := &exchange{list: round[:1]}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var ran atomic.Bool
	go ran.Store(true)
	done, err = e.attend(late, &over)
	require.NoError(t, err)
	require.False(t, done)
	require.True(t, ran.Load())
	clear(to)
	e.start(late)
	require.NoError(t, e.do(round[1:]))
	require.NoError(t, e.wait(late))
	require.Equal(t, from, to)

	over.Store(true)
	began := time.Now()
	patient := &exchange{list: round[:1], bytes: int64(time.Hour / spinByte)}
	done, err = e.attend(patient, &over)
	require.NoError(t, err)
	require.False(t, done)
	require.Less(t, time.Since(began), time.Minute)
	e.start(patient)
	require.NoError(t, e.do(round[1:]))
	require.NoError(t, e.wait(patient))
	e.stop <- true
	require.NoError(t, <-e.ended)
	done, _ = e.attend(&exchange{list: round}, &over)
	require.False(t, done)

	const funneled = "1024" // one thread alone may call
	e, err = startEngine(stub(t, "-DPROVIDED="+funneled), 0, 1)
	require.NoError(t, err)
	x := &exchange{list: round}
	done, err = e.attend(x, &over)
	require.NoError(t, err)
	require.False(t, done)
	require.False(t, x.posted)
	require.NoError(t, e.wait(e.start(x)))
	e.stop <- true
	require.NoError(t, <-e.ended)
}

// collectivesOnTheStub runs each collective on bytes and on a type. The stub checks the arguments.
func collectivesOnTheStub(t *testing.T, e *engine) {
	t.Helper()
	const group = 0x1001
	var made uint64
	require.NoError(t, e.call(func() error {
		return e.lib.check("MPI_Comm_split", dl.Call(e.lib.fn.split, e.lib.world, 0, 0, uintptr(unsafe.Pointer(&made))))
	}))
	require.EqualValues(t, group, made)
	from := []byte("what goes round")
	part := counts{n: []int32{15}, at: []int32{0}}
	for name, f := range map[string]func(to []byte) post{
		"all-gather":         func(to []byte) post { return even(comm.AllGather, group, from, to, block{15, 15}, block{15, 15}) },
		"all-gather of type": func(to []byte) post { return even(comm.AllGather, group, from, to, block{15, 15}, block{15, 40}) },
		"in place": func(to []byte) post {
			copy(to, from)
			return even(comm.AllGather, group, nil, to, block{}, block{15, 15})
		},
		"parts in place": func(to []byte) post {
			copy(to, from)
			return gatherParts(group, to, part)
		},
		"all-to-all": func(to []byte) post { return even(comm.AllToAll, group, from, to, block{15, 20}, block{15, 20}) },
		"counts":     func(to []byte) post { return uneven(group, from, part, block{}, to, part) },
		"blocks": func(to []byte) post {
			return uneven(group, from, counts{n: []int32{1}, at: []int32{0}}, block{15, 20}, to, part)
		},
	} {
		to := make([]byte, 15)
		require.NoError(t, e.wait(e.start(&exchange{posts: []post{f(to)}})), name)
		require.Equal(t, from, to, name)
	}
	err := e.wait(e.start(&exchange{posts: []post{gatherParts(0x999, from, part)}}))
	require.EqualError(t, err, "mpi: MPI_Iallgatherv: stub refuses (code 5)")
}

func TestLibrariesThatAreNone(t *testing.T) {
	_, err := open([]Family{ABI}, "")
	if err != nil { // a machine with such a library refuses nothing
		require.ErrorContains(t, err, "none of libmpi_abi.so.0, libmpi_abi.so can be opened")
	}
	_, err = open(nil, "/nowhere/libmpi.so")
	require.ErrorContains(t, err, `SPILLWAY_MPI="/nowhere/libmpi.so"`)
	_, err = open(nil, "libc.so.6")
	require.ErrorContains(t, err, "libc.so.6 is no library of MPICH")
	require.True(t, strings.HasPrefix((&callError{"MPI_X", 3, "no"}).Error(), "mpi: MPI_X: no"))
}
