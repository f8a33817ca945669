//go:build amd64 || arm64

package libnccl

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"unsafe"

	"github.com/spillway-ml/spillway/internal/dl"

	"github.com/spillway-ml/spillway/comm/nccl"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/device/cuda/dynlib"
)

// functions of the library, by address.
type functions struct {
	getVersion, getUniqueID, getErrorString, getLastError, getAsyncError uintptr
	initRank, split, finalize, destroy, abort                            uintptr
	groupStart, groupEnd, allGather, broadcast, send, recv               uintptr
	shrink                                                               uintptr // 0: NCCL is older than 2.27
}

func (f *functions) symbols() map[string]*uintptr {
	return map[string]*uintptr{
		"ncclGetVersion": &f.getVersion, "ncclGetUniqueId": &f.getUniqueID, "ncclGetErrorString": &f.getErrorString,
		"ncclGetLastError": &f.getLastError, "ncclCommGetAsyncError": &f.getAsyncError,
		"ncclCommInitRankConfig": &f.initRank, "ncclCommSplit": &f.split, "ncclCommFinalize": &f.finalize,
		"ncclCommDestroy": &f.destroy, "ncclCommAbort": &f.abort,
		"ncclGroupStart": &f.groupStart, "ncclGroupEnd": &f.groupEnd, "ncclAllGather": &f.allGather,
		"ncclBroadcast": &f.broadcast, "ncclSend": &f.send, "ncclRecv": &f.recv,
	}
}

// library is an open NCCL.
type library struct {
	functions
	path    string
	version int

	mu   sync.Mutex
	held []*held
}

// held keeps objects whose addresses are passed to NCCL. It is allocated on the heap, where
// objects do not move.
type held struct {
	config config
	id     nccl.ID
	number int32
	list   []int32
}

func (l *library) hold() *held {
	h := &held{}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held = append(l.held, h)
	return h
}

var _ nccl.API = (*library)(nil)

var opened = sync.OnceValues(func() (nccl.API, error) {
	l, err := open()
	if err != nil {
		return nil, err
	}
	return l, nil
})

// Open opens NCCL, once in a process. If it is not installed, the error is one line that
// lists the file names and folders tried.
func Open() (nccl.API, error) { return opened() }

func open() (*library, error) {
	lib, err := dynlib.Open("NCCL", Names...)
	if err != nil {
		return nil, err
	}
	l := &library{path: lib.Path}
	old := fmt.Sprintf("want NCCL %s or later", nccl.VersionText(nccl.OldestVersion))
	if err := lib.Symbols(l.symbols()); err != nil {
		return nil, fmt.Errorf("%s: %w", old, err)
	}
	h := l.hold()
	if err := l.check("ncclGetVersion", 0, call(l.getVersion, uintptr(unsafe.Pointer(&h.number)))); err != nil {
		return nil, err
	}
	if l.version = int(h.number); l.version < nccl.OldestVersion {
		return nil, fmt.Errorf("%s: %s is NCCL %s", old, l.path, nccl.VersionText(l.version))
	}
	if lib.Symbols(map[string]*uintptr{"ncclCommShrink": &l.shrink}) != nil {
		l.shrink = 0
	}
	return l, nil
}

// config is ncclConfig_t of version 2.18. Newer libraries treat fields that it lacks as
// undefined: size and version tell them which fields exist.
type config struct {
	size           uint64
	magic, version uint32
	blocking       int32
	cgaClusterSize int32
	minCTAs        int32
	maxCTAs        int32
	netName        uintptr
	splitShare     int32
	_              int32
}

const (
	configMagic = 0xcafebeef
	undefined   = math.MinInt32
)

func newConfig(o nccl.Config) config {
	c := config{size: uint64(unsafe.Sizeof(config{})), magic: configMagic, version: nccl.OldestVersion,
		blocking: 0, cgaClusterSize: undefined, minCTAs: undefined, maxCTAs: undefined}
	if o.CTAs > 0 {
		c.minCTAs, c.maxCTAs = 1, int32(o.CTAs)
	}
	if o.Share {
		c.splitShare = 1
	}
	return c
}

// frame holds the argument words of a call and space for a returned number. It is reused,
// because SyscallN would allocate its argument list at each call.
type frame struct {
	words  [6 + nccl.IDBytes/8]uintptr
	number int32
}

var frames = sync.Pool{New: func() any { return new(frame) }}

// call calls a function. Its arguments must hold no addresses of memory that may move: see
// held.
func call(f uintptr, args ...uintptr) uintptr {
	w := frames.Get().(*frame)
	n := copy(w.words[:], args)
	r := dl.Call(f, w.words[:n]...)
	frames.Put(w)
	return r
}

// check converts a result to an error. ncclInProgress is not an error.
func (l *library) check(name string, c nccl.Comm, r uintptr) error {
	code := int(int32(r))
	if code == nccl.Success || code == nccl.InProgress {
		return nil
	}
	text := cString(call(l.getErrorString, uintptr(code)))
	if last := cString(call(l.getLastError, uintptr(c))); last != "" {
		text += ": " + last
	}
	return &nccl.Error{Call: name, Code: code, Text: text}
}

// cString copies a string of the library's.
func cString(p uintptr) string {
	const most = 1 << 10
	var b []byte
	for at := p; at != 0 && len(b) < most; at++ {
		c := *(*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&at))) // memory that Go does not manage
		if c == 0 {
			break
		}
		b = append(b, c)
	}
	return string(b)
}

func (l *library) Version() (int, error) { return l.version, nil }

func (l *library) UniqueID() (nccl.ID, error) {
	h := l.hold()
	err := l.check("ncclGetUniqueId", 0, call(l.getUniqueID, uintptr(unsafe.Pointer(&h.id))))
	return h.id, err
}

func (l *library) Init(into *nccl.Comm, ranks int, id nccl.ID, rank int, o nccl.Config) error {
	h := l.hold()
	h.config, h.id = newConfig(o), id
	r := call(l.initRank, initWords(uintptr(unsafe.Pointer(into)), ranks, &h.id, rank, uintptr(unsafe.Pointer(&h.config)))...)
	return l.check("ncclCommInitRankConfig", 0, r)
}

func (l *library) Split(c nccl.Comm, into *nccl.Comm, color, key int, o nccl.Config) error {
	h := l.hold()
	h.config = newConfig(o)
	return l.check("ncclCommSplit", c, call(l.split, uintptr(c), uintptr(color), uintptr(key), uintptr(unsafe.Pointer(into)), uintptr(unsafe.Pointer(&h.config))))
}

func (l *library) Shrinks() error {
	if l.shrink != 0 {
		return nil
	}
	return fmt.Errorf("%s is NCCL %s, which has no ncclCommShrink: want %s or later", l.path, nccl.VersionText(l.version), nccl.VersionText(nccl.ShrinkVersion))
}

// shrinkDefault is NCCL_SHRINK_DEFAULT: the communicator must be idle. NCCL_SHRINK_ABORT
// would abort its operations, but then still refuse a communicator with an error.
const shrinkDefault = 0

func (l *library) Shrink(c nccl.Comm, without []int, into *nccl.Comm, o nccl.Config) error {
	if err := l.Shrinks(); err != nil {
		return err
	}
	if len(without) == 0 {
		return errors.New("ncclCommShrink: want at least one rank to go on without")
	}
	h := l.hold()
	h.config, h.list = newConfig(o), make([]int32, len(without)) // a copy: NCCL sorts it in place
	for i, rank := range without {
		h.list[i] = int32(rank)
	}
	r := call(l.shrink, uintptr(c), uintptr(unsafe.Pointer(&h.list[0])), uintptr(len(without)), uintptr(unsafe.Pointer(into)), uintptr(unsafe.Pointer(&h.config)), shrinkDefault)
	return l.check("ncclCommShrink", c, r)
}

func (l *library) State(c nccl.Comm) (bool, error) {
	w := frames.Get().(*frame)
	defer frames.Put(w)
	r := call(l.getAsyncError, uintptr(c), uintptr(unsafe.Pointer(&w.number)))
	if err := l.check("ncclCommGetAsyncError", c, r); err != nil {
		return false, err
	}
	return w.number == nccl.InProgress, l.check("ncclCommGetAsyncError", c, uintptr(w.number))
}

func (l *library) Finalize(c nccl.Comm) error {
	return l.check("ncclCommFinalize", c, call(l.finalize, uintptr(c)))
}

func (l *library) Destroy(c nccl.Comm) error {
	return l.check("ncclCommDestroy", 0, call(l.destroy, uintptr(c)))
}

func (l *library) Abort(c nccl.Comm) error {
	return l.check("ncclCommAbort", 0, call(l.abort, uintptr(c)))
}

func (l *library) GroupStart() error { return l.check("ncclGroupStart", 0, call(l.groupStart)) }
func (l *library) GroupEnd() error   { return l.check("ncclGroupEnd", 0, call(l.groupEnd)) }

func (l *library) AllGather(send, recv driver.Address, bytes int64, c nccl.Comm, s driver.Stream) error {
	return l.check("ncclAllGather", c, call(l.allGather, uintptr(send), uintptr(recv), uintptr(bytes), nccl.ByteType, uintptr(c), uintptr(s)))
}

func (l *library) Broadcast(buf driver.Address, bytes int64, root int, c nccl.Comm, s driver.Stream) error {
	return l.check("ncclBroadcast", c, call(l.broadcast, uintptr(buf), uintptr(buf), uintptr(bytes), nccl.ByteType, uintptr(root), uintptr(c), uintptr(s)))
}

func (l *library) Send(buf driver.Address, bytes int64, to int, c nccl.Comm, s driver.Stream) error {
	return l.check("ncclSend", c, call(l.send, uintptr(buf), uintptr(bytes), nccl.ByteType, uintptr(to), uintptr(c), uintptr(s)))
}

func (l *library) Recv(buf driver.Address, bytes int64, from int, c nccl.Comm, s driver.Stream) error {
	return l.check("ncclRecv", c, call(l.recv, uintptr(buf), uintptr(bytes), nccl.ByteType, uintptr(from), uintptr(c), uintptr(s)))
}
