package store

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/testkit/folders"
)

// useTier uses the tier like a job of two ranks: each writes a file, reads it and compares.
func useTier(dir string, o Options) error {
	f, err := Open(dir, o)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	for rank := range 2 {
		file, err := f.Create(rank, 3*Page, 0)
		if err != nil {
			return err
		}
		for pass := range 2 {
			mem := make([]byte, 3*Page-5)
			fillBytes(mem, byte(rank+pass+1))
			err := errors.Join(file.Store(mem, 1).Run(), file.Fill(Page, 7, 9).Run())
			if err != nil {
				return err
			}
			clear(mem)
			if err := file.Load(mem, 1).Run(); err != nil {
				return err
			}
			for i, b := range mem {
				if want := byte(rank + pass + 1); b != want && !(b == 9 && i+1 >= Page && i+1 < Page+7) {
					return errors.New("other bytes than were stored")
				}
			}
		}
	}
	return nil
}

// Each file operation of the tier fails once, in each way. Either the job gets an error that names
// the operation and the file, or its bytes are right. No file remains in the folder.
func TestEveryFileOperationFailsOnce(t *testing.T) {
	for name, o := range map[string]Options{
		"unnamed": {Block: 2 * Page, Depth: 2},
		"named":   {Block: 2 * Page, Depth: 2, named: true},
		"cached":  {Block: 2 * Page, Depth: 1, Buffered: true, Cache: 4 * Page},
	} {
		t.Run(name, func(t *testing.T) {
			for _, trouble := range []folders.Trouble{folders.Broken, folders.Full, folders.Short} {
				failed := 0
				for n := 1; ; n++ {
					dir := filepath.Join(t.TempDir(), "disk")
					f := &folders.Fault{At: n, Trouble: trouble}
					disk, err := filesys.Open(filepath.Dir(dir))
					require.NoError(t, err)
					o.Folders = folders.At(f.Folder(disk))
					err = useTier(dir, o)
					require.NoError(t, disk.Close())
					if f.Hit() == "" {
						require.NoError(t, err)
						break
					}
					if err != nil {
						failed++
						var e *Error
						require.ErrorAs(t, err, &e, f.Hit())
						require.Contains(t, err.Error(), "disk tier: ", f.Hit())
						require.Contains(t, err.Error(), filepath.Dir(dir), f.Hit())
					}
					left, err := os.ReadDir(filepath.Dir(dir))
					require.NoError(t, err)
					for _, e := range left { // the folder stays where it can't be removed, and a file that can't
						require.True(t, e.Name() == "disk" && strings.Contains(f.Hit(), "remove") || e.Name() == "disk" && strings.Contains(f.Hit(), "stat"), "%s is left after %s", e.Name(), f.Hit())
					}
				}
				require.Greater(t, failed, 3, "%s, %s", name, trouble)
			}
		})
	}
}
