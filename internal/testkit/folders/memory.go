package folders

import (
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Memory is a tree in memory. It has no links, mounts, owners or permissions, except the file type.
// An open file stays usable after its name is removed, as on Unix.
type Memory struct {
	path string // of the folder that the tree stands for
	mu   sync.Mutex
	root *node
}

// node is a file or a folder.
type node struct {
	names  map[string]*node // of a folder; nil: a file
	data   []byte           // of a file
	shared bool             // data belongs to another tree too: copied before a write
	gone   bool             // of a folder: it was removed
	holder *handle          // has the lock
}

// NewMemory returns an empty tree with the given path as its root's path.
func NewMemory(path string) *Memory {
	return &Memory{path: path, root: &node{names: map[string]*node{}}}
}

// Folder is the tree's root.
func (m *Memory) Folder() filesys.Folder { return &folder{m, m.root, m.path} }

// folder is an open folder of a Memory.
type folder struct {
	m    *Memory
	n    *node
	path string
}

// use locks the tree for an operation on a name and finds the name's node.
func (f *folder) use(name string) (n *node, done func()) {
	f.m.mu.Lock()
	if name == "." {
		return f.n, f.m.mu.Unlock
	}
	return f.n.names[name], f.m.mu.Unlock
}

func (f *folder) at(name string) string { return filepath.Join(f.path, name) }

// OpenFile opens or creates a file. Flags of the system are ignored.
func (f *folder) OpenFile(name string, flag int, _ fs.FileMode) (filesys.File, error) {
	n, done := f.use(name)
	defer done()
	path := f.at(name)
	writes := flag&(os.O_WRONLY|os.O_RDWR) != 0
	switch {
	case n == nil && (f.n.gone || flag&os.O_CREATE == 0):
		return nil, fail("open", path, syscall.ENOENT)
	case n != nil && flag&os.O_CREATE != 0 && flag&os.O_EXCL != 0:
		return nil, fail("open", path, syscall.EEXIST)
	case n != nil && n.names != nil && (writes || flag&os.O_CREATE != 0):
		return nil, fail("open", path, syscall.EISDIR)
	case n == nil:
		n = &node{}
		f.n.names[name] = n
	case writes && flag&os.O_TRUNC != 0:
		n.data, n.shared = nil, false
	}
	return &handle{m: f.m, n: n, path: path, reads: flag&os.O_WRONLY == 0, writes: writes, appends: flag&os.O_APPEND != 0}, nil
}

func (f *folder) Path() string { return f.path }

func (f *folder) Info() (filesys.Info, error) {
	_, done := f.use("")
	defer done()
	return info(filepath.Base(f.path), f.n), nil
}

func (f *folder) Sub(name string) (filesys.Folder, error) {
	n, done := f.use(name)
	defer done()
	switch {
	case n == nil:
		return nil, fail("open", f.at(name), syscall.ENOENT)
	case n.names == nil:
		return nil, fail("open", f.at(name), syscall.ENOTDIR)
	}
	return &folder{f.m, n, f.at(name)}, nil
}

func (f *folder) Mkdir(name string, _ fs.FileMode) error {
	n, done := f.use(name)
	defer done()
	switch {
	case f.n.gone:
		return fail("mkdir", f.at(name), syscall.ENOENT)
	case n != nil:
		return fail("mkdir", f.at(name), syscall.EEXIST)
	}
	f.n.names[name] = &node{names: map[string]*node{}}
	return nil
}

func (f *folder) Remove(name string) error {
	n, done := f.use(name)
	defer done()
	switch {
	case n == nil:
		return fail("remove", f.at(name), syscall.ENOENT)
	case len(n.names) > 0:
		return fail("remove", f.at(name), syscall.ENOTEMPTY)
	}
	n.gone = true
	delete(f.n.names, name)
	return nil
}

func (f *folder) Rename(from, to string) error    { return f.rename(from, to, false) }
func (f *folder) RenameNew(from, to string) error { return f.rename(from, to, true) }

func (f *folder) rename(from, to string, fresh bool) error {
	n, done := f.use(from)
	defer done()
	old := f.n.names[to]
	bad := func(err error) error { return fail("rename", f.at(from), err) }
	switch {
	case n == nil:
		return bad(syscall.ENOENT)
	case old != nil && fresh:
		return bad(syscall.EEXIST)
	case old == n:
		return nil
	case old != nil && len(old.names) > 0:
		return bad(syscall.ENOTEMPTY)
	case old != nil && (old.names == nil) != (n.names == nil):
		return bad(syscall.ENOTDIR)
	}
	delete(f.n.names, from)
	f.n.names[to] = n
	return nil
}

func (f *folder) Names() ([]string, error) {
	_, done := f.use("")
	defer done()
	return slices.Sorted(maps.Keys(f.n.names)), nil
}

func (f *folder) Lstat(name string) (filesys.Info, error) {
	n, done := f.use(name)
	defer done()
	if n == nil {
		return filesys.Info{}, fail("lstat", f.at(name), syscall.ENOENT)
	}
	return info(name, n), nil
}

func (f *folder) Sync() error { return nil }

// Room is unknown: the process's memory is the limit.
func (f *folder) Room() (filesys.Room, error) {
	return filesys.Room{}, fail("statfs", f.path, errors.ErrUnsupported)
}

func (f *folder) Owner() (int64, error) { return filesys.NoOwner, nil }
func (f *folder) Close() error          { return nil }

func info(name string, n *node) filesys.Info {
	i := filesys.Info{Name: name, Size: int64(len(n.data)), Mode: 0o644, Owner: filesys.NoOwner, ID: filesys.ID{Of: n}}
	if n.names != nil {
		i.Size, i.Mode = 0, fs.ModeDir|0o755
	}
	return i
}

// handle is an open file of a Memory.
type handle struct {
	m                      *Memory
	n                      *node
	path                   string
	reads, writes, appends bool
	at                     int64
	closed                 bool
}

// use locks the tree for an operation on an open file.
func (h *handle) use(op string, may bool) (done func(), err error) {
	h.m.mu.Lock()
	switch {
	case h.closed:
		err = fail(op, h.path, os.ErrClosed)
	case !may:
		err = fail(op, h.path, syscall.EBADF)
	case h.n.names != nil:
		err = fail(op, h.path, syscall.EISDIR)
	}
	if err != nil {
		h.m.mu.Unlock()
		return nil, err
	}
	return h.m.mu.Unlock, nil
}

func (h *handle) ReadAt(p []byte, off int64) (int, error) {
	done, err := h.use("read", h.reads)
	if err != nil {
		return 0, err
	}
	defer done()
	return h.read(p, off)
}

func (h *handle) read(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fail("read", h.path, syscall.EINVAL)
	}
	n := 0
	if off < int64(len(h.n.data)) {
		n = copy(p, h.n.data[off:])
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (h *handle) Read(p []byte) (int, error) {
	done, err := h.use("read", h.reads)
	if err != nil {
		return 0, err
	}
	defer done()
	n, err := h.read(p, h.at)
	if h.at += int64(n); n > 0 {
		err = nil
	}
	return n, err
}

func (h *handle) WriteAt(p []byte, off int64) (int, error) {
	done, err := h.use("write", h.writes)
	if err != nil {
		return 0, err
	}
	defer done()
	return h.write(p, off)
}

func (h *handle) write(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fail("write", h.path, syscall.EINVAL)
	}
	h.n.data = overwrite(h.n.own(), p, off)
	return len(p), nil
}

func (h *handle) Write(p []byte) (int, error) {
	done, err := h.use("write", h.writes)
	if err != nil {
		return 0, err
	}
	defer done()
	if h.appends {
		h.at = int64(len(h.n.data))
	}
	n, err := h.write(p, h.at)
	h.at += int64(n)
	return n, err
}

// own returns a file's bytes, copied first if another tree shares them.
func (n *node) own() []byte {
	if n.shared {
		n.data, n.shared = slices.Clone(n.data), false
	}
	return n.data
}

// overwrite writes p at off. A gap before it reads as zeros.
func overwrite(data, p []byte, off int64) []byte {
	data = resize(data, max(int64(len(data)), off+int64(len(p))))
	copy(data[off:], p)
	return data
}

func resize(data []byte, size int64) []byte {
	if size <= int64(len(data)) {
		return data[:size:size] // the bytes cut off must not reappear
	}
	return append(data, make([]byte, size-int64(len(data)))...)
}

func (h *handle) Truncate(size int64) error {
	done, err := h.use("truncate", h.writes && size >= 0)
	if err != nil {
		return err
	}
	defer done()
	h.n.data = resize(h.n.own(), size)
	return nil
}

func (h *handle) Allocate(size int64) error {
	done, err := h.use("allocate", h.writes && size >= 0)
	if err != nil {
		return err
	}
	defer done()
	h.n.data = resize(h.n.own(), max(size, int64(len(h.n.data))))
	return nil
}

func (h *handle) Name() string { return h.path }

func (h *handle) Stat() (filesys.Info, error) {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	if h.closed {
		return filesys.Info{}, fail("stat", h.path, os.ErrClosed)
	}
	return info(filepath.Base(h.path), h.n), nil
}

func (h *handle) Sync() error {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	if h.closed {
		return fail("sync", h.path, os.ErrClosed)
	}
	return nil
}

func (h *handle) Fd() uintptr { return ^uintptr(0) }

func (h *handle) TryLock() (bool, error) {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	switch {
	case h.closed:
		return false, fail("lock", h.path, os.ErrClosed)
	case h.n.holder != nil && h.n.holder != h:
		return false, nil
	}
	h.n.holder = h
	return true, nil
}

func (h *handle) Close() error {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	if h.closed {
		return fail("close", h.path, os.ErrClosed)
	}
	h.closed = true
	if h.n.holder == h {
		h.n.holder = nil
	}
	return nil
}

// Clone returns a tree with the same files, none of them open.
func (m *Memory) Clone() *Memory {
	m.mu.Lock()
	defer m.mu.Unlock()
	var clone func(*node) *node
	clone = func(n *node) *node {
		if n.names == nil {
			n.shared = true
			return &node{data: n.data, shared: true}
		}
		out := &node{names: map[string]*node{}}
		for name, sub := range n.names {
			out.names[name] = clone(sub)
		}
		return out
	}
	return &Memory{path: m.path, root: clone(m.root)}
}

// Unlock releases all locks, as the end of the processes that hold them does.
func (m *Memory) Unlock() {
	m.mu.Lock()
	defer m.mu.Unlock()
	var unlock func(*node)
	unlock = func(n *node) {
		n.holder = nil
		for _, sub := range n.names {
			unlock(sub)
		}
	}
	unlock(m.root)
}
