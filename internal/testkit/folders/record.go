package folders

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// opKind is the kind of an operation of a Log.
type opKind int

const (
	opEntries opKind = iota // names in folders changed: create, rename, remove
	opWrite                 // bytes of a file
	opSize                  // its length
	opSync                  // a file's bytes and length are durable
	opSyncDir               // a folder's names are durable
	opNote                  // a note of the program
)

// inode identifies a file or folder of a Log, independently of its names. 0 is the logged folder.
type inode int

const none inode = -1

// edit gives a name in a folder to an inode, or removes the name if the inode is none.
type edit struct {
	dir  inode
	name string
	to   inode
}

// Op is one operation of a Log.
type Op struct {
	What string // description: "rename", "sync" …
	Path string // as the program named it
	kind opKind
	on   inode  // written, synced
	off  int64  // of a write, in bytes
	data []byte // the bytes written
	size int64  // new length
	edit []edit // changes of names, made together or not at all
	note any
}

// Log is the record of a Record: operations that change files and folders, and those that make
// changes durable, in order.
type Log struct {
	ops     []Op
	folders map[inode]bool
}

// Len returns the number of operations, including notes.
func (l *Log) Len() int { return len(l.ops) }

// Ops returns the operations with their descriptions and paths.
func (l *Log) Ops() []Op { return slices.Clone(l.ops) }

// Record logs the operations in a folder, which is empty at first, and below it. They are logged in
// the order in which they happen, one at a time.
type Record struct {
	root filesys.Folder
	// quick skips the syncs: they are only logged.
	quick bool

	mu     sync.Mutex
	log    Log
	tree   map[inode]map[string]inode // folders
	serial inode
}

// NewRecord returns a Record of an empty folder. With quick, syncs are logged but not made.
func NewRecord(root filesys.Folder, quick bool) *Record {
	return &Record{root: root, quick: quick,
		log:  Log{folders: map[inode]bool{0: true}},
		tree: map[inode]map[string]inode{0: {}}}
}

// Folder returns the logged folder.
func (r *Record) Folder() filesys.Folder { return &logged{r.root, r, 0} }

// Note adds a note of the program to the log. Log.States passes it with each later state.
func (r *Record) Note(note any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.log.ops = append(r.log.ops, Op{What: "note", kind: opNote, note: note})
}

// Log returns the log so far.
func (r *Record) Log() *Log {
	r.mu.Lock()
	defer r.mu.Unlock()
	return &Log{ops: slices.Clone(r.log.ops), folders: maps.Clone(r.log.folders)}
}

// add logs a change of names and applies it to the tree.
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

// logged is a folder opened through a Record.
type logged struct {
	filesys.Folder
	r *Record
	n inode
}

// find returns the inode of a name in the log's tree.
func (f *logged) find(name string) (inode, bool) {
	n, ok := f.r.tree[f.n][name]
	return n, ok
}

func (f *logged) at(name string) string { return filepath.Join(f.Path(), name) }

// OpenFile opens a file. Creating or emptying it is logged.
func (f *logged) OpenFile(name string, flag int, perm fs.FileMode) (filesys.File, error) {
	f.r.mu.Lock()
	defer f.r.mu.Unlock()
	inner, err := f.Folder.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	n, there := f.find(name)
	switch {
	case !there && flag&os.O_CREATE != 0:
		n = f.r.fresh()
		f.r.add("create", f.at(name), edit{f.n, name, n})
	case !there: // a file without a name, of which nothing remains
		n = none
	case flag&os.O_TRUNC != 0 && flag&(os.O_WRONLY|os.O_RDWR) != 0:
		f.r.log.ops = append(f.r.log.ops, Op{What: "truncate", Path: f.at(name), kind: opSize, on: n})
	}
	return &recorded{File: inner, r: f.r, n: n, appends: flag&os.O_APPEND != 0}, nil
}

func (f *logged) Sub(name string) (filesys.Folder, error) {
	f.r.mu.Lock()
	defer f.r.mu.Unlock()
	inner, err := f.Folder.Sub(name)
	if err != nil {
		return nil, err
	}
	n, _ := f.find(name)
	return &logged{inner, f.r, n}, nil
}

func (f *logged) Mkdir(name string, perm fs.FileMode) error {
	f.r.mu.Lock()
	defer f.r.mu.Unlock()
	if err := f.Folder.Mkdir(name, perm); err != nil {
		return err
	}
	n := f.r.fresh()
	f.r.tree[n] = map[string]inode{}
	f.r.log.folders[n] = true
	f.r.add("mkdir", f.at(name), edit{f.n, name, n})
	return nil
}

func (f *logged) Remove(name string) error {
	f.r.mu.Lock()
	defer f.r.mu.Unlock()
	if err := f.Folder.Remove(name); err != nil {
		return err
	}
	f.r.add("remove", f.at(name), edit{f.n, name, none})
	return nil
}

func (f *logged) Rename(from, to string) error { return f.rename(from, to, f.Folder.Rename) }

func (f *logged) RenameNew(from, to string) error { return f.rename(from, to, f.Folder.RenameNew) }

func (f *logged) rename(from, to string, inner func(from, to string) error) error {
	f.r.mu.Lock()
	defer f.r.mu.Unlock()
	if err := inner(from, to); err != nil {
		return err
	}
	if n, ok := f.find(from); ok {
		f.r.add("rename", f.at(from), edit{f.n, from, none}, edit{f.n, to, n})
	}
	return nil
}

func (f *logged) Sync() error {
	f.r.mu.Lock()
	defer f.r.mu.Unlock()
	if !f.r.quick {
		if err := f.Folder.Sync(); err != nil {
			return err
		}
	}
	f.r.log.ops = append(f.r.log.ops, Op{What: "sync folder", Path: f.Path(), kind: opSyncDir, on: f.n})
	return nil
}

// recorded is a file opened through a Record; n is none outside its folder.
type recorded struct {
	filesys.File
	r       *Record
	n       inode
	appends bool
	at      int64 // position of the next Write
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
		f.at = st.Size
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
		f.logged(Op{What: "allocate", kind: opSize, size: st.Size})
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
	f.logged(Op{What: "sync", kind: opSync})
	return nil
}
