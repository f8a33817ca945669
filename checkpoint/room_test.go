package checkpoint

import (
	"context"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/testkit/folders"
)

// TestNeedsOfTheNextCheckpoints compares Room.Needs with a simulation of the bytes on disk while
// each checkpoint is written.
func TestNeedsOfTheNextCheckpoints(t *testing.T) {
	const each = 10
	for keep := range 5 {
		for saves := int64(1); saves < 9; saves++ {
			for old := range 5 {
				r := Room{Goes: 3, After: 4, keep: keep}
				for range old {
					r.Own = append(r.Own, each-1)
				}
				if keep > 0 && old > keep {
					continue // the first update leaves no more
				}
				there, most := append([]int64{}, r.Own...), int64(math.MinInt64)
				for k := range saves {
					there = append([]int64{each}, there...)
					var taken int64
					for _, n := range there {
						taken += n
					}
					for _, n := range r.Own {
						taken -= n
					}
					taken -= r.Goes
					if k > 0 {
						taken -= r.After
					}
					most = max(most, taken)
					if keep > 0 {
						there = there[:min(len(there), keep)]
					}
				}
				require.Equal(t, most, r.Needs(each, saves), "keep %d, %d saves, %d old", keep, saves, old)
			}
		}
	}
	endless := Room{}
	require.Equal(t, int64(math.MaxInt64), endless.Needs(1<<40, 1<<40))
	full := Room{Room: filesys.Room{Free: 45}, Own: []int64{10}}
	require.Equal(t, int64(4), full.Keeps(10), "five in all")
	require.Zero(t, full.Keeps(100))
}

// roomy is a folder, and its opener, on a file system with the given free bytes.
type roomy struct {
	filesys.Folder
	free int64
}

func (r roomy) Room() (filesys.Room, error) {
	return filesys.Room{Free: r.free, Most: r.free}, nil
}

func (r roomy) Open(path string) (f filesys.Folder, err error) {
	r.Folder, err = filesys.Open(path)
	return r, err
}

// TestRoomOfAFolder checks the space that Room expects for a resumed run. Checkpoints that the run's
// Keep does not cover are going to be freed. Checkpoints of other runs are not.
func TestRoomOfAFolder(t *testing.T) {
	dir := t.TempDir()
	disk := roomy{free: 1000}
	s, err := Open(dir, Options{})
	require.NoError(t, err)
	var sizes []int64
	for step := 1; step <= 3; step++ {
		_, err := s.Save(context.Background(), Manifest{Step: step, Ranks: 1, Run: []byte("{}")}, nil, []Blob{{Name: "b", Data: make([]byte, 10*step)}})
		require.NoError(t, err)
		require.NoError(t, s.Confirm())
		m, err := ReadManifest(filepath.Join(dir, Name(step, 1)))
		require.NoError(t, err)
		text, err := os.Stat(filepath.Join(dir, Name(step, 1), manifestName))
		require.NoError(t, err)
		require.Equal(t, 1+int64(10*step)+text.Size(), m.takes(1))
		require.Equal(t, 4096*3, int(m.takes(4096)), "a folder, a file and the manifest, a block each")
		sizes = append(sizes, m.takes(1))
	}
	require.NoError(t, s.Close())
	for keep, want := range []Room{
		{Own: []int64{sizes[2], sizes[1], sizes[0]}},
		{Goes: sizes[0] + sizes[1], Own: []int64{sizes[2]}},
		{Goes: sizes[0], Own: []int64{sizes[2], sizes[1]}},
	} {
		s, err := Open(dir, Options{Keep: keep, Folders: disk})
		require.NoError(t, err)
		from, err := Choose(context.Background(), dir, nil)
		require.NoError(t, err)
		got, known, err := s.Room(from)
		require.NoError(t, err)
		require.True(t, known)
		want.Room, want.keep = filesys.Room{Free: 1000, Most: 1000}, keep
		require.Equal(t, want, got)
		fresh, _, err := s.Room(Choice{})
		require.NoError(t, err)
		require.Equal(t, Room{Room: want.Room, keep: keep}, fresh, "another run's are not its to remove")
		require.NoError(t, s.Close())
	}
}

// TestRoomThatNobodyKnows checks that the room is unknown on a file system that does not report
// free space.
func TestRoomThatNobodyKnows(t *testing.T) {
	unknown := folders.At(folders.NewMemory("/unknown").Folder())
	s, err := Open("/unknown", Options{Folders: unknown})
	require.NoError(t, err)
	_, known, err := s.Room(Choice{})
	require.NoError(t, err)
	require.False(t, known)
	require.NoError(t, s.Close())
}
