package folders

import (
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"strings"
)

// A power loss keeps everything that was synced. Any other operation may have reached the disk or
// not, independently of the operations before and after it. This is the weakest behaviour that
// POSIX allows, which ALICE (Pillai et al., OSDI 2014) found in file systems in use. Replaying
// logged operations is the method of ALICE and CrashMonkey (Mohan et al., OSDI 2018):
//
//   - a write is lost, whole, or torn between sectors; where it made the file longer,
//     the length may be there without the bytes, which then read as zeros;
//   - syncing a file keeps its bytes and its length, not its name;
//   - making, renaming and removing change names, each as a whole: of a rename there
//     is the old name or the new one. They may reach the disk in any order until their
//     folder is synced; syncing a folder says nothing of what its names' files hold.

// Sector is the number of bytes that a disk writes atomically.
const Sector = 512

// Bounds limits an enumeration. n operations that are not durable have 2 to the n states. For more
// than Every operations only these are visited: those that keep all but at most two, or lose all
// but at most two (at most one for more than 3 · Every operations), and those that keep only the
// first k, or only the last k. A torn write is combined with every choice of the others for at most
// half as many operations, and otherwise only with all kept and with all lost.
type Bounds struct {
	Every int // 0: 8; at most 16
}

// State is a possible state of a folder after a power loss.
type State struct {
	Files *Memory // owned by the caller, who may change it
	Note  any     // the last note logged before
	After int     // number of operations that had happened, including notes
	log   *Log
	left  []pending
	got   []fate
}

// String describes which operations were lost.
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

// fate says how much of an operation that is not durable is kept.
type fate int8

const (
	lost       fate = iota
	kept            // whole
	onlyLength      // of a write that extended the file: only the length
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

// disk holds the durable contents after some operations, and the operations that are not durable.
type disk struct {
	log     *Log
	files   map[inode][]byte // never changed in place
	folders map[inode]map[string]inode
	pending []pending
	mine    map[inode]bool // files and folders that may be changed in place; nil: none
}

// States calls visit with every state that a power loss after any operation of the log may leave,
// within the bounds, each once per note. path is the name of the logged folder. It returns the
// number of states, and the first error of visit with a description of its state.
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
			err = e.all(false) // a lower bound, so that more operations are within it
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

// sync makes the operations durable that a sync covers.
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

// apply applies an operation to the durable contents.
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

// own copies a file or folder if it is shared, and reports whether it was the disk's own already.
func (d *disk) own(n inode) bool {
	was := d.mine[n]
	if d.mine != nil {
		d.mine[n] = true
	}
	return was
}

// change returns a file's bytes after a write or a change of length, made in place.
func (op *Op) change(data []byte, f fate) []byte {
	if op.kind == opSize {
		return resize(data, op.size)
	}
	end := op.off + int64(len(op.data))
	if f != firstSector { // it alone need not reach the end
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

// forget drops files and folders that no name can reach any more, with any choice of pending
// operations.
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

// enumeration is the progress of a call of States.
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

// all visits the states of the operations that are not durable now. With fresh, the last operation
// has just happened, so the states without it were visited before.
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

// some visits a selection of the states, if there are too many operations to combine all.
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
		for i := range len(got) + 1 { // the first i have one fate, the others the other
			fill(0, i, 1-most)
			fill(i, len(got), most)
			if err := e.take(got, true); err != nil {
				return err
			}
		}
	}
	return nil
}

// torn visits the states in which one write is torn. Few other operations are kept in every
// combination; of many, all or none are kept.
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

// tears returns the ways in which an operation can be partly kept.
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

// take visits the state in which these operations are kept, unless the same contents were visited
// since the last note.
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

// hash returns a hash of the tree below an inode.
func (d *disk) hash(n inode, seed maphash.Seed) uint64 {
	if !d.log.folders[n] {
		return maphash.Bytes(seed, d.files[n])
	}
	var h maphash.Hash
	h.SetSeed(seed)
	names := d.folders[n]
	for _, name := range slices.Sorted(maps.Keys(names)) {
		_, _ = h.WriteString(name) // a hash returns no error
		_ = h.WriteByte(0)
		var sub [8]byte
		binary.LittleEndian.PutUint64(sub[:], d.hash(names[name], seed))
		_, _ = h.Write(sub[:])
	}
	_ = h.WriteByte(1) // distinguishes an empty folder from an empty file
	return h.Sum64()
}

// tree builds the node of an inode, with everything below it.
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

// Without returns the log of a program that makes the same operations, except the syncs (of files
// and folders) that drop selects.
func (l *Log) Without(drop func(Op) bool) *Log {
	ops := slices.DeleteFunc(slices.Clone(l.ops), func(op Op) bool {
		return (op.kind == opSync || op.kind == opSyncDir) && drop(op)
	})
	return &Log{ops: ops, folders: l.folders}
}
