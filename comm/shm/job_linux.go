package shm

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/comm/world"
)

// The control segment. Every field that another process reads while it changes
// is atomic; the layout is that of these structs, whose version is in magic.
const (
	magic      = 0x5350_4c57_0005 // "SPLW", version 5
	maxSlots   = 5                // groups of a rank: the world and the axes replicate, shard, tensor and pipeline
	maxRegions = 8                // arenas of a rank
	records    = 64               // operations that the flight recorder keeps
	maxRanks   = 256
)

// header is the header of the job's control segment.
type header struct {
	Magic     uint64
	Processes uint32
	Cores     uint32        // number of cores that all ranks share
	each      atomic.Uint32 // ranks of every process; 0 until the first has joined
	_         uint32
	steps     atomic.Uint64 // completed training steps, stored by rank 0
	// ended is 0 while there is no error, 1 while a process writes the error, 2 afterwards.
	ended   atomic.Uint32
	kind    uint32
	rank    uint32
	textLen uint32
	text    [1024]byte
	pids    [maxRanks]atomic.Uint32 // process IDs, stored by the parent process
}

// region is an arena of a rank in its process's file.
type region struct{ off, size atomic.Int64 }

// rankArea is the state that a rank publishes to the others.
type rankArea struct {
	state   atomic.Uint32 // watch.State
	pid     atomic.Uint32
	beat    atomic.Uint64
	regions [maxRegions]region
	count   atomic.Uint32 // number of regions
	_       uint32

	point     atomic.Uint32 // phase of the current Send or Recv
	pointPeer atomic.Uint32
	pointCall atomic.Uint64
	pointText text

	flight atomic.Uint64 // operations recorded so far
	log    [records]record
}

// record is one operation in the flight recorder.
type record struct {
	begin, end atomic.Int64 // now(); end is 0 while it runs
	call       uint64
	bytes      int64
	text       text
}

// text is a string of at most 116 bytes.
type text struct {
	n uint32
	b [116]byte
}

func (t *text) set(s string) { t.n = uint32(copy(t.b[:], s)) }

func (t *text) String() string { return string(t.b[:min(int(t.n), len(t.b))]) }

// operand is a range of a rank's region; region -1: none.
type operand struct {
	region int64
	off, n int64
}

// post is the memory in which a rank publishes its current operation, in a group or a pair.
type post struct {
	bell   atomic.Uint32 // changes when the rank should check the others again
	asleep atomic.Uint32
	came   atomic.Uint64 // number of operations at which the rank has arrived
	left   atomic.Uint64 // number of operations that the rank has left
	phase  atomic.Uint32 // watch.Phase
	kind   uint32        // number of the operation: world.OpNumber
	dtype  uint32
	flags  uint32 // 1: accumulate
	bytes  int64
	root   int64
	sig    atomic.Uint64 // hash of the signature
	in     operand
	out    operand
	text   text
}

// Job is the shared memory of a job's processes.
type Job struct {
	control   []byte
	processes int
	world     int        // number of ranks; the number of processes until it is known
	files     []*os.File // the control segment, then one file for each process's arenas
	mu        sync.Mutex // of know
}

func segmentSize(world int) int {
	n := align(int(unsafe.Sizeof(header{}))) + world*align(int(unsafe.Sizeof(rankArea{}))) + maxSlots*world*postSize + maxSlots*world*world*2*postSize
	return n
}

const postSize = 512 // bytes of a post; a multiple of a cache line

func align(n int) int { return (n + 63) &^ 63 }

// Create creates the shared memory of a job with the given number of processes, which inherit its
// Files. The first process to join sets the number of ranks of every process.
func Create(processes int) (*Job, error) {
	if processes < 1 || processes > maxRanks {
		return nil, fmt.Errorf("shared memory: %d ranks, want 1 to %d", processes, maxRanks)
	}
	j := &Job{processes: processes, world: processes}
	for i := range processes + 1 {
		fd, err := unix.MemfdCreate(fmt.Sprintf("spillway-%d", i), unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("shared memory: %w", os.NewSyscallError("memfd_create", err)), j.Close())
		}
		j.files = append(j.files, os.NewFile(uintptr(fd), "shared memory"))
		// If a file cannot shrink, no page can be removed under a reader.
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK); err != nil {
			return nil, errors.Join(fmt.Errorf("shared memory: %w", os.NewSyscallError("fcntl", err)), j.Close())
		}
	}
	if err := j.files[0].Truncate(int64(segmentSize(j.world))); err != nil {
		return nil, errors.Join(fmt.Errorf("shared memory: %w", err), j.Close())
	}
	if err := j.attach(); err != nil {
		return nil, errors.Join(err, j.Close())
	}
	j.header().Processes = uint32(processes)
	j.header().Cores = uint32(min(runtime.NumCPU(), runtime.GOMAXPROCS(0))) // a process of the job may be bound to some
	atomic.StoreUint64(&j.header().Magic, magic)
	return j, nil
}

// Attach opens the job whose Files a process has inherited, in their order.
func Attach(files []*os.File) (*Job, error) {
	if len(files) < 2 || len(files) > maxRanks+1 {
		return nil, fmt.Errorf("shared memory: %d files, want the job's and one a process", len(files))
	}
	j := &Job{processes: len(files) - 1, world: len(files) - 1, files: files}
	st, err := files[0].Stat()
	if err != nil {
		return nil, fmt.Errorf("shared memory: the job's file: %w", err)
	}
	if st.Size() < int64(segmentSize(j.world)) { // another process may have made it longer
		return nil, fmt.Errorf("shared memory: the job's file has %d bytes, want %d for %d processes: another build of the program?", st.Size(), segmentSize(j.world), j.processes)
	}
	if err := j.attach(); err != nil {
		return nil, err
	}
	if h := j.header(); atomic.LoadUint64(&h.Magic) != magic || int(h.Processes) != j.processes {
		return nil, errors.Join(errors.New("shared memory: not a job of this version of the program"), j.Close())
	}
	for _, f := range files {
		unix.CloseOnExec(int(f.Fd()))
	}
	return j, nil
}

func (j *Job) attach() (err error) {
	j.control, err = unix.Mmap(int(j.files[0].Fd()), 0, segmentSize(j.world), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("shared memory: %w", os.NewSyscallError("mmap", err))
	}
	return nil
}

// each sets the number of ranks of every process, or checks it if another process has set it.
func (j *Job) each(ranks int) error {
	if ranks < 1 || ranks*j.processes > maxRanks {
		return fmt.Errorf("shared memory: %d processes of %d ranks, want 1 to %d ranks in all", j.processes, ranks, maxRanks)
	}
	if !j.header().each.CompareAndSwap(0, uint32(ranks)) && int(j.header().each.Load()) != ranks {
		return fmt.Errorf("shared memory: this process runs %d ranks, another one of the job %d", ranks, j.header().each.Load())
	}
	return j.know()
}

// know maps the areas of all ranks, once a process has set the number of ranks.
func (j *Job) know() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.grow()
}

// grow does the same as know; the caller holds the lock.
func (j *Job) grow() error {
	world := j.processes * max(1, int(j.header().each.Load()))
	if world == j.world {
		return nil
	}
	size := int64(segmentSize(world))
	if st, err := j.files[0].Stat(); err != nil || st.Size() < size { // the file only grows: its seal
		if err := j.files[0].Truncate(size); err != nil {
			return fmt.Errorf("shared memory: %w", err)
		}
	}
	before := j.control
	j.world = world
	if err := j.attach(); err != nil {
		j.control, j.world = before, j.processes
		return err
	}
	return os.NewSyscallError("munmap", unix.Munmap(before))
}

// Processes returns the number of processes, and the number of ranks that each of them runs, 1
// until one of them has joined.
func (j *Job) Processes() (processes, each int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := j.grow(); err != nil {
		return j.processes, 1
	}
	return j.processes, j.world / j.processes
}

// SetPID publishes the process ID of a process of the job, before it joins.
func (j *Job) SetPID(process, pid int) { j.header().pids[process].Store(uint32(pid)) }

// Where describes the process of a rank by its ID; "" while it is unknown.
func (j *Job) Where(rank int) string {
	pid := j.pid(rank)
	if pid == 0 {
		return ""
	}
	host, _ := os.Hostname()
	return fmt.Sprintf("host %s, process %d", host, pid)
}

// pid returns the process ID of a rank; 0: unknown.
func (j *Job) pid(rank int) uint32 {
	return cmp.Or(j.rank(rank).pid.Load(), j.header().pids[rank/max(1, int(j.header().each.Load()))].Load())
}

// Fail makes err, found by rank, the job's error. It returns false if the job already has one.
func (j *Job) Fail(rank int, err error) bool {
	h := j.header()
	if !h.ended.CompareAndSwap(0, 1) {
		return false
	}
	h.kind = uint32(world.Kind(err))
	h.rank = uint32(rank)
	h.textLen = uint32(copy(h.text[:], err.Error()))
	h.ended.Store(2)
	return true
}

// SetSteps publishes the number of steps that the job has completed.
func (j *Job) SetSteps(n int) { j.header().steps.Store(uint64(max(n, 0))) }

// Steps returns the number of completed steps that SetSteps stored last.
func (j *Job) Steps() int { return int(j.header().steps.Load()) }

// file returns the file that holds the arenas of a rank.
func (j *Job) file(rank int) *os.File { return j.files[1+rank/(j.world/j.processes)] }

// Files returns the files that a process of the job inherits.
func (j *Job) Files() []*os.File { return j.files }

// Close unmaps and closes the job in this process. It must not be in use.
func (j *Job) Close() error {
	var errs []error
	if j.control != nil {
		errs = append(errs, os.NewSyscallError("munmap", unix.Munmap(j.control)))
		j.control = nil
	}
	for _, f := range j.files {
		errs = append(errs, f.Close())
	}
	j.files = nil
	return errors.Join(errs...)
}

func at[T any](j *Job, off int) *T { return (*T)(unsafe.Pointer(&j.control[off])) }

func (j *Job) header() *header { return at[header](j, 0) }

func (j *Job) rank(r int) *rankArea {
	return at[rankArea](j, align(int(unsafe.Sizeof(header{})))+r*align(int(unsafe.Sizeof(rankArea{}))))
}

func (j *Job) posts() int {
	return align(int(unsafe.Sizeof(header{}))) + j.world*align(int(unsafe.Sizeof(rankArea{})))
}

// post returns rank's place in its group of a slot.
func (j *Job) post(slot, rank int) *post {
	return at[post](j, j.posts()+(slot*j.world+rank)*postSize)
}

// pair returns the place of the sender (0) or the receiver (1) of a pair of ranks.
func (j *Job) pair(slot, from, to, side int) *post {
	base := j.posts() + maxSlots*j.world*postSize
	return at[post](j, base+(((slot*j.world+from)*j.world+to)*2+side)*postSize)
}
