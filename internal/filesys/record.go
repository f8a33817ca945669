package filesys

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// opKind is what an operation of a Log does.
type opKind int

const (
	opEntries opKind = iota // names of folders changed: make, rename, remove
	opWrite                 // bytes of a file
	opSize                  // its length
	opSync                  // a file's bytes and length are durable
	opSyncDir               // a folder's names are durable
	opNote                  // of the program
)

// inode is a file or a folder of a Log, whatever its names. 0 is the logged folder
// itself.
type inode int

const none inode = -1

// edit gives a name of a folder to an inode; none takes it away.
type edit struct {
	dir  inode
	name string
	to   inode
}

// Op is one operation of a Log.
type Op struct {
	What string // in words: "rename", "sync" …
	Path string // as the program named it
	kind opKind
	on   inode  // written, synced
	off  int64  // of a write, in bytes
	data []byte // written
	size int64  // new length
	edit []edit // of one operation: all or none
	note any
}

// Log is what a Record saw: the operations that change files and folders, and those
// that make changes durable, in order.
type Log struct {
	ops     []Op
	folders map[inode]bool
}

// Len is the number of operations, notes among them.
func (l *Log) Len() int { return len(l.ops) }

// Ops returns the operations' words and paths.
func (l *Log) Ops() []Op { return slices.Clone(l.ops) }

// Record is another file system with a log of what happens below a folder, which is
// empty at first. Operations are logged in the order in which they happen, one at a
// time.
type Record struct {
	FS          // the one in between
	base string // absolute
	// quick leaves syncs out of the one in between: they are logged.
	quick bool

	mu     sync.Mutex
	log    Log
	tree   map[inode]map[string]inode // folders
	serial inode
}

// NewRecord logs what happens below base, an empty folder of inner. With quick, syncs
// are logged and not done.
func NewRecord(inner FS, base string, quick bool) *Record {
	return &Record{FS: inner, base: absolute(base), quick: quick,
		log:  Log{folders: map[inode]bool{0: true}},
		tree: map[inode]map[string]inode{0: {}}}
}

// Note puts what the program knows into the log: from there on Log.States hands it
// on with each state.
func (r *Record) Note(note any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.log.ops = append(r.log.ops, Op{What: "note", kind: opNote, note: note})
}

// Log returns what has been logged so far.
func (r *Record) Log() *Log {
	r.mu.Lock()
	defer r.mu.Unlock()
	return &Log{ops: slices.Clone(r.log.ops), folders: maps.Clone(r.log.folders)}
}

// find returns what a path names in the log's own tree: none where nothing does, and
// a folder of none where that is not there.
func (r *Record) find(path string) (n, dir inode, name string) {
	path = absolute(path)
	if !within(r.base, path) {
		return none, none, ""
	}
	n, dir = 0, none
	for _, name = range strings.FieldsFunc(path[len(r.base):], func(c rune) bool { return c == filepath.Separator }) {
		if n == none || r.tree[n] == nil {
			return none, none, ""
		}
		dir = n
		var ok bool
		if n, ok = r.tree[dir][name]; !ok {
			n = none
		}
	}
	return n, dir, name
}

// add logs a change of names and does it in the tree.
func (r *Record) add(what, path string, edits ...edit) {
	for _, e := range edits {
		if e.to == none {
			delete(r.tree[e.dir], e.name)
		} else {
			r.tree[e.dir][e.name] = e.to
		}
	}
	r.log.ops = append(r.log.ops, Op{What: what, Path: path, kind: opEntries, edit: edits})
}

func (r *Record) fresh() inode {
	r.serial++
	return r.serial
}

// OpenFile opens a file; that it makes one, or empties it, is logged.
func (r *Record) OpenFile(path string, flag int, perm fs.FileMode) (File, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	inner, err := r.FS.OpenFile(path, flag, perm)
	if err != nil {
		return nil, err
	}
	n, dir, name := r.find(path)
	writes := flag&(os.O_WRONLY|os.O_RDWR) != 0
	switch {
	case r.log.folders[n] && writes: // a file without a name, of which nothing is left
		n = none
	case n == none && dir != none && flag&os.O_CREATE != 0:
		n = r.fresh()
		r.add("create", path, edit{dir, name, n})
	case n != none && flag&os.O_TRUNC != 0 && writes:
		r.log.ops = append(r.log.ops, Op{What: "truncate", Path: path, kind: opSize, on: n})
	}
	return &recorded{File: inner, r: r, n: n, appends: flag&os.O_APPEND != 0}, nil
}

// Mkdir makes a folder.
func (r *Record) Mkdir(path string, perm fs.FileMode) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.FS.Mkdir(path, perm); err != nil {
		return err
	}
	if _, dir, name := r.find(path); dir != none {
		n := r.fresh()
		r.tree[n] = map[string]inode{}
		r.log.folders[n] = true
		r.add("mkdir", path, edit{dir, name, n})
	}
	return nil
}

// Remove removes a file or an empty folder.
func (r *Record) Remove(path string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.FS.Remove(path); err != nil {
		return err
	}
	if n, dir, name := r.find(path); n != none && dir != none {
		r.add("remove", path, edit{dir, name, none})
	}
	return nil
}

// Rename gives a file or folder another name.
func (r *Record) Rename(from, to string) error { return r.rename(from, to, r.FS.Rename) }

// RenameNew does so where nobody has it.
func (r *Record) RenameNew(from, to string) error { return r.rename(from, to, r.FS.RenameNew) }

func (r *Record) rename(from, to string, inner func(from, to string) error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := inner(from, to); err != nil {
		return err
	}
	n, dir, name := r.find(from)
	if _, target, as := r.find(to); n != none && dir != none && target != none {
		r.add("rename", from, edit{dir, name, none}, edit{target, as, n})
	}
	return nil
}

// SyncDir makes a folder's names durable.
func (r *Record) SyncDir(path string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.quick {
		if err := r.FS.SyncDir(path); err != nil {
			return err
		}
	}
	if n, _, _ := r.find(path); n != none {
		r.log.ops = append(r.log.ops, Op{What: "sync folder", Path: path, kind: opSyncDir, on: n})
	}
	return nil
}

// recorded is an open file of a Record; n is none outside of its folder.
type recorded struct {
	File
	r       *Record
	n       inode
	appends bool
	at      int64 // where Write goes on
}

func (f *recorded) logged(op Op) {
	if f.n != none {
		op.Path, op.on = f.Name(), f.n
		f.r.log.ops = append(f.r.log.ops, op)
	}
}

func (f *recorded) WriteAt(p []byte, off int64) (int, error) {
	f.r.mu.Lock()
	defer f.r.mu.Unlock()
	n, err := f.File.WriteAt(p, off)
	f.wrote(p[:n], off)
	return n, err
}

func (f *recorded) wrote(p []byte, off int64) {
	if len(p) > 0 {
		f.logged(Op{What: "write", kind: opWrite, off: off, data: slices.Clone(p)})
	}
}

func (f *recorded) Write(p []byte) (int, error) {
	f.r.mu.Lock()
	defer f.r.mu.Unlock()
	if f.appends {
		st, err := f.File.Stat()
		if err != nil {
			return 0, err
		}
		f.at = st.Size()
	}
	n, err := f.File.Write(p)
	f.wrote(p[:n], f.at)
	f.at += int64(n)
	return n, err
}

func (f *recorded) Read(p []byte) (int, error) {
	f.r.mu.Lock()
	defer f.r.mu.Unlock()
	n, err := f.File.Read(p)
	f.at += int64(n)
	return n, err
}

func (f *recorded) Truncate(size int64) error {
	f.r.mu.Lock()
	defer f.r.mu.Unlock()
	err := f.File.Truncate(size)
	if err == nil {
		f.logged(Op{What: "truncate", kind: opSize, size: size})
	}
	return err
}

func (f *recorded) Allocate(size int64) error {
	f.r.mu.Lock()
	defer f.r.mu.Unlock()
	err := f.File.Allocate(size)
	if err != nil {
		return err
	}
	st, err := f.File.Stat()
	if err == nil {
		f.logged(Op{What: "allocate", kind: opSize, size: st.Size()})
	}
	return err
}

func (f *recorded) Sync() error {
	f.r.mu.Lock()
	defer f.r.mu.Unlock()
	if !f.r.quick {
		if err := f.File.Sync(); err != nil {
			return err
		}
	}
	if f.n != none && f.r.log.folders[f.n] {
		f.logged(Op{What: "sync folder", kind: opSyncDir})
	} else {
		f.logged(Op{What: "sync", kind: opSync})
	}
	return nil
}
