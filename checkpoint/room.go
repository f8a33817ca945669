package checkpoint

import (
	"maps"
	"math"
	"time"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Room is the disk space for a run's checkpoints, in bytes. A checkpoint is removed only after
// a newer one is whole, so both need space at once.
type Room struct {
	filesys.Room
	Goes  int64   // freed before the first checkpoint is written: Options.Keep does not cover it
	After int64   // freed once the first checkpoint is whole: those replaced by Options.Mark
	Own   []int64 // sizes of the run's confirmed checkpoints that stay, newest first
	keep  int
}

// Room returns the space of the store's file system for the checkpoints of a run that resumes from
// a checkpoint; from has no name for a new run. It returns false if the space is unknown.
func (s *Store) Room(from Choice) (Room, bool, error) {
	free, err := s.f.Room()
	if err != nil {
		return Room{}, false, nil
	}
	entries, err := s.Dir().Scan()
	if err != nil {
		return Room{}, false, err
	}
	return roomOf(free, entries, s.marks, from, s.owner, s.o), true, nil
}

// roomOf computes Room from a folder's entries. It assumes marks as after the run's first
// update, which confirms the checkpoint resumed from.
func roomOf(free filesys.Room, entries []Entry, marks Marks, from Choice, owner string, o Options) Room {
	r := Room{Room: free, keep: o.Keep}
	marks.confirmed, marks.left = maps.Clone(marks.confirmed), maps.Clone(marks.left)
	if from.Found() {
		if from.Manifest.Owner != "" {
			owner = from.Manifest.Owner
		}
		for _, p := range from.Passed {
			marks.left[p.Manifest.key()] = true
		}
		marks.confirmed[from.Manifest.key()] = true
		delete(marks.left, from.Manifest.key())
	}
	gone := map[string]bool{}
	for _, e := range expendable(entries, &marks, owner, o.Keep) {
		gone[e.Name] = true
		r.Goes += e.Manifest.takes(free.Block)
	}
	for i := len(entries) - 1; i >= 0; i-- {
		e := &entries[i]
		key := e.Manifest.key()
		switch {
		case e.Err != nil || gone[e.Name]:
		case e.Manifest.Owner != owner:
			if o.Mark != "" && e.Manifest.Mark == o.Mark {
				r.After += e.Manifest.takes(free.Block)
			}
		case marks.confirmed[key] && !marks.left[key]:
			r.Own = append(r.Own, e.Manifest.takes(free.Block))
		}
	}
	return r
}

// takes returns the disk space, in bytes, of a checkpoint in a file system with the given block
// size: its folder, its files and the manifest.
func (m *Manifest) takes(block int64) int64 {
	block = max(block, 1)
	up := func(n int64) int64 { return (n + block - 1) / block * block }
	n := block
	for _, f := range m.Files {
		n += up(f.Bytes)
	}
	if text, err := m.text(); err == nil {
		n += up(int64(len(text)))
	}
	return n
}

// Takes returns the disk space, in bytes, that a checkpoint of these parts will need in the store's
// file system.
func (s *Store) Takes(m Manifest, parts []*Part, blobs []Blob) (int64, error) {
	now := time.Now().UTC().Truncate(time.Second)
	m.Version, m.ID, m.Owner, m.Mark, m.Written = Version, random(), s.owner, s.o.Mark, &now
	for _, p := range parts {
		w, err := newPartFile(p)
		if err != nil {
			return 0, err
		}
		m.Files = append(m.Files, File{Name: p.fileName(), Bytes: w.layout.Size, CRC32C: "00000000", Header: w.layout.Data})
	}
	for _, b := range blobs {
		m.Files = append(m.Files, File{Name: b.Name, Bytes: int64(len(b.Data)), CRC32C: "00000000"})
	}
	room, err := s.f.Room()
	if err != nil {
		room.Block = 1 // unknown
	}
	return m.takes(room.Block), nil
}

// Needs returns the most free space, in bytes, that the run's next checkpoints use at once. saves
// is their number and each is the size of one. While the k-th is written, Keep of those before it
// still exist.
func (r *Room) Needs(each, saves int64) (most int64) {
	old := int64(len(r.Own))
	last := saves // the largest number of new checkpoints at once
	if r.keep > 0 {
		last = min(saves, int64(r.keep)+1)
	}
	// From the first save that removes no old checkpoint of the run, needs only grow up to last.
	for k := max(last-old, 1); ; k = min(k+1, last) {
		most = max(most, r.needs(each, k))
		if k >= last {
			return max(most, r.needs(each, 1))
		}
	}
}

// needs returns the space used while the k-th new checkpoint is written.
func (r *Room) needs(each, k int64) int64 {
	if k > math.MaxInt64/max(each, 1) {
		return math.MaxInt64
	}
	n := k*each - r.Goes
	if k > 1 {
		n -= r.After
	}
	if r.keep > 0 {
		for i := max(int64(r.keep)-(k-1), 0); i < int64(len(r.Own)); i++ {
			n -= r.Own[i]
		}
	}
	return n
}

// Keeps returns the largest Options.Keep with which checkpoints always fit in the free space; 0 if
// not even 1 does. each is the size of one, in bytes.
func (r *Room) Keeps(each int64) int64 {
	free := r.Free + min(r.Goes, math.MaxInt64-r.Free)
	for _, n := range r.Own {
		free += min(n, math.MaxInt64-free)
	}
	return max(free/max(each, 1)-1, 0)
}
