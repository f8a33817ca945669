package folders

import (
	"errors"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// after runs a program on a log and returns every tree that it may leave, sorted.
func after(t *testing.T, b Bounds, program func(r *Record)) []string {
	r := NewRecord(NewMemory("/m").Folder(), true)
	program(r)
	var all []string
	n, err := r.Log().States("/m", b, func(s State) error {
		all = append(all, names(t, s.Files.Folder()))
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, len(all), n)
	slices.Sort(all)
	return slices.Compact(all)
}

func put(t *testing.T, f filesys.Folder, path, text string, sync bool) {
	o, err := f.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o666)
	require.NoError(t, err)
	_, err = o.Write([]byte(text))
	require.NoError(t, err)
	if sync {
		require.NoError(t, o.Sync())
	}
	require.NoError(t, o.Close())
}

// sub is a folder of the logged one.
func sub(t *testing.T, r *Record, name string) filesys.Folder {
	f, err := r.Folder().Sub(name)
	require.NoError(t, err)
	return f
}

// The states of the oldest mistake, a rename before the sync, and of its cure.
func TestStatesOfARename(t *testing.T) {
	for _, c := range []struct {
		name         string
		file, folder bool
		want         []string // once the program has ended
	}{
		{"nothing synced", false, false, []string{"", "a=", "a=__", "a=xy", "b=", "b=__", "b=xy"}},
		{"file synced", true, false, []string{"", "a=xy", "b=xy"}},
		{"folder synced", false, true, []string{"b=", "b=__", "b=xy"}},
		{"both synced", true, true, []string{"b=xy"}},
	} {
		ended := false
		r := NewRecord(NewMemory("/m").Folder(), true)
		put(t, r.Folder(), "a", "xy", c.file)
		require.NoError(t, r.Folder().Rename("a", "b"))
		if c.folder {
			require.NoError(t, r.Folder().Sync())
		}
		r.Note("ended")
		var all []string
		_, err := r.Log().States("/m", Bounds{}, func(s State) error {
			if s.Note == "ended" {
				ended = true
				all = append(all, names(t, s.Files.Folder()))
			}
			return nil
		})
		require.NoError(t, err)
		require.True(t, ended)
		slices.Sort(all)
		require.Equal(t, c.want, all, c.name)
	}
}

func TestStatesOfTornWrites(t *testing.T) {
	long := make([]byte, 3*Sector)
	for i := range long {
		long[i] = byte('a' + i/Sector)
	}
	kinds := map[string]bool{}
	for _, tree := range after(t, Bounds{}, func(r *Record) {
		put(t, r.Folder(), "f", "old", true)
		require.NoError(t, r.Folder().Sync())
		o, err := r.Folder().OpenFile("f", os.O_RDWR, 0)
		require.NoError(t, err)
		_, err = o.WriteAt(long, 0)
		require.NoError(t, err)
	}) {
		if len(tree) < 2*Sector {
			kinds[tree[:min(6, len(tree))]+"…"] = true
			continue
		}
		kinds[string([]byte{tree[2], tree[2+Sector], tree[2+2*Sector]})] = true
	}
	require.Equal(t, map[string]bool{
		"…": true, "f=…": true, "f=___…": true, "f=old…": true, // before the second sync
		"o__":     true, // its length alone
		"f=aaaa…": true, "o_c": true, "obc": true, "ab_": true, "abc": true,
	}, kinds)
}

// Folders: what is in them is durable by their own sync, that they are there by their
// parent's; what nothing leads to is forgotten.
func TestStatesOfFolders(t *testing.T) {
	got := after(t, Bounds{}, func(r *Record) {
		require.NoError(t, r.Folder().Mkdir("d", 0o777))
		put(t, sub(t, r, "d"), "f", "x", true)
		require.NoError(t, sub(t, r, "d").Sync())
	})
	require.Equal(t, []string{"", "d/()", "d/(f=)", "d/(f=_)", "d/(f=x)"}, got)
	got = after(t, Bounds{}, func(r *Record) {
		require.NoError(t, r.Folder().Mkdir("d", 0o777))
		require.NoError(t, r.Folder().Sync())
		put(t, sub(t, r, "d"), "f", "x", true)
		require.NoError(t, sub(t, r, "d").Sync())
		require.NoError(t, r.Folder().Rename("d", "e"))
		require.NoError(t, sub(t, r, "e").Remove("f"))
		require.NoError(t, r.Folder().Remove("e"))
	})
	require.Equal(t, []string{"", "d/()", "d/(f=)", "d/(f=_)", "d/(f=x)", "e/()", "e/(f=x)"}, got)
}

// Notes are handed on, and states of before come again with the new one.
func TestStatesHaveNotes(t *testing.T) {
	r := NewRecord(NewMemory("/m").Folder(), true)
	put(t, r.Folder(), "a", "1", true)
	r.Note(1)
	require.NoError(t, r.Folder().Sync())
	r.Note(2)
	seen := map[any][]string{}
	_, err := r.Log().States("/m", Bounds{}, func(s State) error {
		seen[s.Note] = append(seen[s.Note], names(t, s.Files.Folder()))
		return filesys.WriteSynced(s.Files.Folder(), "elsewhere", nil, 0) // a state's own affair
	})
	require.NoError(t, err)
	clear(seen)
	_, err = r.Log().States("/m", Bounds{}, func(s State) error {
		seen[s.Note] = append(seen[s.Note], names(t, s.Files.Folder()))
		return nil
	})
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"", "a=", "a=_", "a=1"}, seen[nil])
	require.ElementsMatch(t, []string{"", "a=1"}, seen[1])
	require.ElementsMatch(t, []string{"a=1"}, seen[2])
}

// Of many operations the states are bounded, and every single loss is among them.
func TestStatesAreBounded(t *testing.T) {
	const files = 12
	r := NewRecord(NewMemory("/m").Folder(), true)
	for i := range files {
		put(t, r.Folder(), string(rune('a'+i)), "x", true)
	}
	r.Note("ended")
	single := map[int]bool{}
	n, err := r.Log().States("/m", Bounds{Every: 4}, func(s State) error {
		list, err := s.Files.Folder().Names()
		if s.After == r.Log().Len() && len(list) == files-1 {
			have := 0
			for _, e := range list {
				have |= 1 << (e[0] - 'a')
			}
			single[have] = true
		}
		return err
	})
	require.NoError(t, err)
	require.Less(t, n, 2000)
	require.Len(t, single, files)
}

// A state is the visitor's own: writing to it changes no other.
func TestStatesAreApart(t *testing.T) {
	r := NewRecord(NewMemory("/m").Folder(), true)
	put(t, r.Folder(), "a", "first", true)
	require.NoError(t, r.Folder().Sync())
	put(t, r.Folder(), "b", "second", true)
	bad := errors.New("changed")
	_, err := r.Log().States("/m", Bounds{}, func(s State) error {
		o, err := s.Files.Folder().OpenFile("a", os.O_RDWR, 0)
		if err != nil {
			return nil // not there yet
		}
		got := make([]byte, 1)
		if n, _ := o.ReadAt(got, 0); n == 1 && got[0] == '!' {
			return bad
		}
		_, err = o.WriteAt([]byte("!"), 0)
		return err
	})
	require.NoError(t, err)

	// Without a sync that the program did, a state more is left.
	lessSynced := r.Log().Without(func(op Op) bool { return op.What == "sync" && op.Path == "/m/a" })
	found := false
	_, err = lessSynced.States("/m", Bounds{}, func(s State) error {
		found = found || names(t, s.Files.Folder()) == "a= b=second"
		return nil
	})
	require.NoError(t, err)
	require.True(t, found)
}
