package filesys

import (
	"cmp"
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Memory is a file system in memory. It has no links, and no rights but those that
// say what a name is. What was opened outlives its name, as on Unix.
type Memory struct {
	base string // the folder that the tree stands for, absolute
	mu   sync.Mutex
	root *node
}

// node is a file or a folder.
type node struct {
	names  map[string]*node // of a folder; nil: a file
	data   []byte           // of a file
	shared bool             // data belongs to another tree too: copied before a write
	holder *handle          // has the lock
}

// NewMemory returns an empty tree that stands for the folder base.
func NewMemory(base string) *Memory {
	return &Memory{base: absolute(base), root: &node{names: map[string]*node{}}}
}

// find returns what path names, its folder and its last name. n is nil where
// nothing has the name, and folder where there is no such folder, for the reason why.
func (m *Memory) find(path string) (n, folder *node, name string, why error) {
	path = absolute(path)
	if !within(m.base, path) {
		return nil, nil, "", syscall.ENOENT
	}
	n = m.root
	for _, name = range strings.FieldsFunc(path[len(m.base):], func(r rune) bool { return r == filepath.Separator }) {
		if n == nil {
			return nil, nil, "", syscall.ENOENT
		}
		if n.names == nil {
			return nil, nil, "", syscall.ENOTDIR
		}
		folder, n = n, n.names[name]
	}
	return n, folder, name, nil
}

func fail(op, path string, err error) error { return &fs.PathError{Op: op, Path: path, Err: err} }

// OpenFile opens or makes a file; the system's flags count for nothing.
func (m *Memory) OpenFile(path string, flag int, _ fs.FileMode) (File, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, folder, name, why := m.find(path)
	writes := flag&(os.O_WRONLY|os.O_RDWR) != 0
	switch {
	case why != nil:
		return nil, fail("open", path, why)
	case n == nil && (folder == nil || flag&os.O_CREATE == 0):
		return nil, fail("open", path, syscall.ENOENT)
	case n != nil && flag&os.O_CREATE != 0 && flag&os.O_EXCL != 0:
		return nil, fail("open", path, syscall.EEXIST)
	case n != nil && n.names != nil && writes:
		return nil, fail("open", path, syscall.EISDIR)
	case n == nil:
		n = &node{}
		folder.names[name] = n
	case writes && flag&os.O_TRUNC != 0:
		n.data, n.shared = nil, false
	}
	return &handle{m: m, n: n, path: path, reads: flag&os.O_WRONLY == 0, writes: writes, appends: flag&os.O_APPEND != 0}, nil
}

// Mkdir makes a folder.
func (m *Memory) Mkdir(path string, _ fs.FileMode) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, folder, name, why := m.find(path)
	switch {
	case why != nil:
		return fail("mkdir", path, why)
	case n != nil:
		return fail("mkdir", path, syscall.EEXIST)
	}
	folder.names[name] = &node{names: map[string]*node{}}
	return nil
}

// Remove removes a file or an empty folder.
func (m *Memory) Remove(path string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, folder, name, why := m.find(path)
	switch {
	case why != nil:
		return fail("remove", path, why)
	case n == nil || folder == nil:
		return fail("remove", path, syscall.ENOENT)
	case len(n.names) > 0:
		return fail("remove", path, syscall.ENOTEMPTY)
	}
	delete(folder.names, name)
	return nil
}

// Rename gives what from names the name to.
func (m *Memory) Rename(from, to string) error { return m.rename(from, to, false) }

// RenameNew does so where nobody has it.
func (m *Memory) RenameNew(from, to string) error { return m.rename(from, to, true) }

func (m *Memory) rename(from, to string, fresh bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, folder, name, why := m.find(from)
	old, target, as, bar := m.find(to)
	bad := func(err error) error { return &os.LinkError{Op: "rename", Old: from, New: to, Err: err} }
	switch {
	case why != nil || bar != nil:
		return bad(cmp.Or(why, bar))
	case n == nil || folder == nil || target == nil:
		return bad(syscall.ENOENT)
	case old != nil && fresh:
		return bad(syscall.EEXIST)
	case old == n:
		return nil
	case n.names != nil && within(absolute(from), absolute(to)):
		return bad(syscall.EINVAL)
	case old != nil && len(old.names) > 0:
		return bad(syscall.ENOTEMPTY)
	case old != nil && (old.names == nil) != (n.names == nil):
		return bad(syscall.ENOTDIR)
	}
	delete(folder.names, name)
	target.names[as] = n
	return nil
}

// ReadDir lists a folder by name.
func (m *Memory) ReadDir(path string) ([]fs.DirEntry, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, _, _, why := m.find(path)
	switch {
	case why != nil:
		return nil, fail("open", path, why)
	case n == nil:
		return nil, fail("open", path, syscall.ENOENT)
	case n.names == nil:
		return nil, fail("readdirent", path, syscall.ENOTDIR)
	}
	var list []fs.DirEntry
	for _, name := range slices.Sorted(maps.Keys(n.names)) {
		list = append(list, fs.FileInfoToDirEntry(info(name, n.names[name])))
	}
	return list, nil
}

// Stat describes what path names.
func (m *Memory) Stat(path string) (fs.FileInfo, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, _, _, why := m.find(path)
	if n == nil {
		return nil, fail("stat", path, cmp.Or(why, error(syscall.ENOENT)))
	}
	return info(filepath.Base(path), n), nil
}

// Lstat is Stat: there are no links.
func (m *Memory) Lstat(path string) (fs.FileInfo, error) { return m.Stat(path) }

// SyncDir sees that there is such a folder.
func (m *Memory) SyncDir(path string) error {
	_, err := m.ReadDir(path)
	return err
}

// Room is not known: it ends with the process's memory.
func (m *Memory) Room(path string) (Room, error) {
	return Room{}, fail("statfs", path, errors.ErrUnsupported)
}

// about describes a node.
type about struct {
	name string
	size int64
	mode fs.FileMode
	n    *node
}

func info(name string, n *node) about {
	if n.names != nil {
		return about{name, 0, fs.ModeDir | 0o755, n}
	}
	return about{name, int64(len(n.data)), 0o644, n}
}

func (a about) Name() string       { return a.name }
func (a about) Size() int64        { return a.size }
func (a about) Mode() fs.FileMode  { return a.mode }
func (a about) ModTime() time.Time { return time.Time{} }
func (a about) IsDir() bool        { return a.mode.IsDir() }
func (a about) Sys() any           { return a.n }

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

// own returns a file's bytes as ones that may be changed.
func (n *node) own() []byte {
	if n.shared {
		n.data, n.shared = slices.Clone(n.data), false
	}
	return n.data
}

// overwrite writes p at off; a gap before it reads as zeros.
func overwrite(data, p []byte, off int64) []byte {
	data = resize(data, max(int64(len(data)), off+int64(len(p))))
	copy(data[off:], p)
	return data
}

func resize(data []byte, size int64) []byte {
	if size <= int64(len(data)) {
		return data[:size:size] // what is cut off is not seen again
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

func (h *handle) Stat() (fs.FileInfo, error) {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	if h.closed {
		return nil, fail("stat", h.path, os.ErrClosed)
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

// Clone returns a tree with the same files, which nobody has open.
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
	return &Memory{base: m.base, root: clone(m.root)}
}

// Unlock gives back all locks, as the end of the processes that had them does.
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
