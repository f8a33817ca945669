package folders

import (
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"strings"
)

// A power loss keeps what was synced. Of all else each operation may have reached the
// disk or not, whatever came before or after it. This is the weakest behaviour that
// POSIX allows of the file systems that ALICE (Pillai et al., OSDI 2014) found in use,
// and the replay of logged operations is that of ALICE and CrashMonkey (Mohan et al.,
// OSDI 2018):
//
//   - a write is lost, whole, or torn between sectors; where it made the file longer,
//     the length may be there without the bytes, which then read as zeros;
//   - syncing a file keeps its bytes and its length, not its name;
//   - making, renaming and removing change names, each as a whole: of a rename there
//     is the old name or the new one. They may reach the disk in any order until their
//     folder is synced; syncing a folder says nothing of what its names' files hold.

// Sector is what a disk writes as a whole, in bytes.
const Sector = 512

// Bounds of an enumeration. States are 2 to the number of operations that are not
// durable; of more than Every of them, those are taken in which all but up to two are
// lost, or all but up to two are kept (up to one where they are more than 3 · Every),
// or the first n are kept, or the last n. Of one write that is torn they are all, of
// up to half as many operations, or two: the others kept, and the others lost.
type Bounds struct {
	Every int // 0: 8; at most 16
}

// State is what may be left of a folder.
type State struct {
	Files *Memory // the caller's own: it may change it
	Note  any     // the last that was logged before
	After int     // operations had happened, notes among them
	log   *Log
	left  []pending
	got   []fate
}

// String says what was lost, for a person.
func (s State) String() string {
	var b strings.Builder
	if s.After > 0 {
		op := s.log.ops[s.After-1]
		fmt.Fprintf(&b, "after operation %d (%s %s)", s.After, op.What, op.Path)
	}
	for i, p := range s.left {
		if s.got[i] != kept {
			op := s.log.ops[p.op]
			fmt.Fprintf(&b, "; %s: operation %d, %s %s", s.got[i], p.op+1, op.What, op.Path)
		}
	}
	return b.String()
}

// fate of an operation that is not durable.
type fate int8

const (
	lost       fate = iota
	kept            // whole
	onlyLength      // of a write that made the file longer: the length
	firstSector
	lastSector
	allButFirst
	allButLast
)

func (f fate) String() string {
	return [...]string{"lost", "kept", "only its length is kept", "only its first sector is kept", "only its last sector is kept", "its first sector is lost", "its last sector is lost"}[f]
}

// pending is an operation that is not durable.
type pending struct {
	op  int // its index
	now *Op
}

// disk is what is durable after some operations, and what is not.
type disk struct {
	log     *Log
	files   map[inode][]byte // never changed in place
	folders map[inode]map[string]inode
	pending []pending
	mine    map[inode]bool // files and folders that may be changed in place; nil: none
}

// States calls visit with every state that a loss of power after any of the log's
// operations may leave, within bounds, each once for a note; path is what the
// folder that was logged is called. It returns how many there were, and the first error of visit, with the
// state that it was about.
func (l *Log) States(path string, b Bounds, visit func(State) error) (int, error) {
	if b.Every <= 0 {
		b.Every = 8
	}
	b.Every = min(b.Every, 16)
	d := &disk{log: l, files: map[inode][]byte{}, folders: map[inode]map[string]inode{0: {}}}
	e := &enumeration{bounds: b, path: path, disk: d, visit: visit, seen: map[uint64]bool{}, seed: maphash.MakeSeed()}
	if err := e.take(nil, true); err != nil {
		return e.count, err
	}
	for i := range l.ops {
		op := &l.ops[i]
		e.after = i + 1
		var err error
		switch op.kind {
		case opNote:
			e.note = op.note
			clear(e.seen)
			err = e.all(false)
		case opSync, opSyncDir:
			d.sync(op)
			err = e.all(false) // fewer, so that more of them are within bounds
		default:
			d.pending = append(d.pending, pending{i, op})
			err = e.all(true)
		}
		if err != nil {
			return e.count, err
		}
	}
	return e.count, nil
}

// sync makes durable what a sync says.
func (d *disk) sync(op *Op) {
	d.pending = slices.DeleteFunc(d.pending, func(p pending) bool {
		touches := p.now.on == op.on && p.now.kind != opEntries
		if op.kind == opSyncDir {
			touches = slices.ContainsFunc(p.now.edit, func(e edit) bool { return e.dir == op.on })
		}
		if touches {
			d.apply(p.now, kept)
		}
		return touches
	})
	d.forget()
}

// apply does an operation on what is durable.
func (d *disk) apply(op *Op, f fate) {
	switch op.kind {
	case opEntries:
		for _, e := range op.edit {
			names := d.folders[e.dir]
			if !d.own(e.dir) {
				names = maps.Clone(names)
			}
			if names == nil {
				names = map[string]inode{}
			}
			if e.to == none {
				delete(names, e.name)
			} else {
				names[e.name] = e.to
			}
			d.folders[e.dir] = names
		}
	default:
		data := d.files[op.on]
		if !d.own(op.on) {
			data = slices.Clone(data)
		}
		d.files[op.on] = op.change(data, f)
	}
}

// own makes a file or folder one's own, and tells whether it was.
func (d *disk) own(n inode) bool {
	was := d.mine[n]
	if d.mine != nil {
		d.mine[n] = true
	}
	return was
}

// change returns a file's bytes after a write or a change of length, in place.
func (op *Op) change(data []byte, f fate) []byte {
	if op.kind == opSize {
		return resize(data, op.size)
	}
	end := op.off + int64(len(op.data))
	if f != firstSector { // which alone need not reach to the end
		data = resize(data, max(int64(len(data)), end))
	}
	lo, hi := op.off, end
	first := min(end, (op.off/Sector+1)*Sector) // end of the first sector
	last := max(op.off, (end-1)/Sector*Sector)  // begin of the last
	switch f {
	case onlyLength:
		return data
	case firstSector:
		hi = first
		data = resize(data, max(int64(len(data)), hi))
	case lastSector:
		lo = last
	case allButFirst:
		lo = first
	case allButLast:
		hi = last
	}
	copy(data[lo:], op.data[lo-op.off:hi-op.off])
	return data
}

// forget drops what no name leads to any more, whatever is kept of the rest.
func (d *disk) forget() {
	live := map[inode]bool{0: true}
	for grown := true; grown; {
		grown = false
		reach := func(dir, n inode) {
			if live[dir] && n != none && !live[n] {
				live[n], grown = true, true
			}
		}
		for dir, names := range d.folders {
			for _, n := range names {
				reach(dir, n)
			}
		}
		for _, p := range d.pending {
			for _, e := range p.now.edit {
				reach(e.dir, e.to)
			}
		}
	}
	d.pending = slices.DeleteFunc(d.pending, func(p pending) bool {
		if p.now.kind == opEntries {
			return !slices.ContainsFunc(p.now.edit, func(e edit) bool { return live[e.dir] })
		}
		return !live[p.now.on]
	})
	maps.DeleteFunc(d.files, func(n inode, _ []byte) bool { return !live[n] })
	maps.DeleteFunc(d.folders, func(n inode, _ map[string]inode) bool { return !live[n] })
}

// enumeration is a States on its way.
type enumeration struct {
	bounds Bounds
	path   string
	disk   *disk
	visit  func(State) error
	seen   map[uint64]bool // since the last note
	seed   maphash.Seed
	note   any
	after  int
	count  int
}

// all takes the states of what is not durable now. With fresh, the last operation has
// just happened: states without it were taken before.
func (e *enumeration) all(fresh bool) error {
	n := len(e.disk.pending)
	got := make([]fate, n)
	if n <= e.bounds.Every {
		for set := range 1 << n {
			for i := range got {
				got[i] = fate(set >> i & 1)
			}
			if err := e.take(got, !fresh || got[n-1] == kept); err != nil {
				return err
			}
		}
	} else if err := e.some(got); err != nil {
		return err
	}
	return e.torn(got)
}

// some takes the states of more operations than can all be combined.
func (e *enumeration) some(got []fate) error {
	for _, most := range []fate{kept, lost} {
		fill := func(from, to int, f fate) {
			for i := from; i < to; i++ {
				got[i] = f
			}
		}
		fill(0, len(got), most)
		for i := range got { // singles and pairs
			for k := i; k < len(got) && (k == i || len(got) <= 3*e.bounds.Every); k++ {
				got[i], got[k] = 1-most, 1-most
				if err := e.take(got, true); err != nil {
					return err
				}
				got[i], got[k] = most, most
			}
		}
		for i := range len(got) + 1 { // the first i are of one kind, the others of the other
			fill(0, i, 1-most)
			fill(i, len(got), most)
			if err := e.take(got, true); err != nil {
				return err
			}
		}
	}
	return nil
}

// torn takes the states in which one write is torn, the others of few operations
// kept in every combination, of many all or none.
func (e *enumeration) torn(got []fate) error {
	n := len(got)
	sets := []int{0, -1} // bits of what is kept: none, all
	if n <= e.bounds.Every/2 {
		for set := 1; set < 1<<n-1; set++ {
			sets = append(sets, set)
		}
	}
	for i, p := range e.disk.pending {
		for _, f := range p.now.tears() {
			for _, set := range sets {
				for k := range got {
					got[k] = lost
					if set == -1 || set>>k&1 == 1 {
						got[k] = kept
					}
				}
				got[i] = f
				if err := e.take(got, true); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// tears are the ways in which an operation is kept in part.
func (op *Op) tears() []fate {
	switch sectors := (op.off+int64(len(op.data))-1)/Sector - op.off/Sector + 1; {
	case op.kind != opWrite:
		return nil
	case sectors == 1:
		return []fate{onlyLength}
	case sectors == 2:
		return []fate{onlyLength, firstSector, lastSector}
	default:
		return []fate{onlyLength, firstSector, lastSector, allButFirst, allButLast}
	}
}

// take visits the state in which these operations are kept, unless one of its
// contents was visited since the last note.
func (e *enumeration) take(got []fate, wanted bool) error {
	if !wanted {
		return nil
	}
	d := &disk{log: e.disk.log, files: maps.Clone(e.disk.files), folders: maps.Clone(e.disk.folders), mine: map[inode]bool{}}
	for i, p := range e.disk.pending {
		if got[i] != lost {
			d.apply(p.now, got[i])
		}
	}
	key := d.hash(0, e.seed)
	if e.seen[key] {
		return nil
	}
	e.seen[key] = true
	e.count++
	m := NewMemory(e.path)
	m.root = d.tree(0)
	s := State{Files: m, Note: e.note, After: e.after, log: e.disk.log, left: e.disk.pending, got: slices.Clone(got)}
	if err := e.visit(s); err != nil {
		return fmt.Errorf("%s: %w", s, err)
	}
	return nil
}

// hash of what a name leads to.
func (d *disk) hash(n inode, seed maphash.Seed) uint64 {
	if !d.log.folders[n] {
		return maphash.Bytes(seed, d.files[n])
	}
	var h maphash.Hash
	h.SetSeed(seed)
	names := d.folders[n]
	for _, name := range slices.Sorted(maps.Keys(names)) {
		_, _ = h.WriteString(name) // a hash never fails
		_ = h.WriteByte(0)
		var sub [8]byte
		binary.LittleEndian.PutUint64(sub[:], d.hash(names[name], seed))
		_, _ = h.Write(sub[:])
	}
	_ = h.WriteByte(1) // an empty folder is no empty file
	return h.Sum64()
}

// tree makes what a name leads to.
func (d *disk) tree(n inode) *node {
	if !d.log.folders[n] {
		return &node{data: d.files[n], shared: true}
	}
	out := &node{names: map[string]*node{}}
	for name, to := range d.folders[n] {
		out.names[name] = d.tree(to)
	}
	return out
}

// Without returns the log of a program that does the same and leaves out the syncs
// (of files and of folders) that drop picks.
func (l *Log) Without(drop func(Op) bool) *Log {
	ops := slices.DeleteFunc(slices.Clone(l.ops), func(op Op) bool {
		return (op.kind == opSync || op.kind == opSyncDir) && drop(op)
	})
	return &Log{ops: ops, folders: l.folders}
}
