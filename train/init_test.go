package train

import (
	"context"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/internal/filesys"
)

// countedReads opens folders that count the bytes read behind the files' headers.
type countedReads struct {
	header int64 // bytes
	bytes  atomic.Int64
}

func (c *countedReads) Open(path string) (filesys.Folder, error) {
	f, err := filesys.Open(path)
	return countedFolder{f, c}, err
}

type countedFolder struct {
	filesys.Folder
	of *countedReads
}

func (c countedFolder) Sub(name string) (filesys.Folder, error) {
	f, err := c.Folder.Sub(name)
	return countedFolder{f, c.of}, err
}

func (c countedFolder) OpenFile(name string, flag int, perm os.FileMode) (filesys.File, error) {
	f, err := c.Folder.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	return &countedFile{f, c.of}, nil
}

type countedFile struct {
	filesys.File
	of *countedReads
}

func (f *countedFile) ReadAt(b []byte, off int64) (int, error) {
	n, err := f.File.ReadAt(b, off)
	if off >= f.of.header {
		f.of.bytes.Add(int64(n))
	}
	return n, err
}

// shaOfStart returns the hash of a run's initial parameters.
func shaOfStart(c request) (string, error) {
	tr, err := c.start(context.Background())
	if err != nil {
		return "", err
	}
	defer tr.Close()
	return tr.ParamsSHA256()
}

// TestInitReadsWeightsOnce checks that Init reads and verifies a checkpoint's weights in one pass.
// If they are damaged, Init uses the newest intact checkpoint of the folder.
func TestInitReadsWeightsOnce(t *testing.T) {
	t.Parallel()
	c := keeping(t, 2)
	c.Ranks, c.SaveEvery = 3, 1
	ended(t, c)
	folder := c.Checkpoint
	older, newest := filepath.Join(folder, "step-00000001"), filepath.Join(folder, "step-00000002")
	begin := tiny("gpt2")
	begin.Ranks = 2
	var told []string
	begin.Warn = func(line string) { told = append(told, line) }
	from := func(path string) (string, error) {
		begin.Init = path
		return shaOfStart(begin)
	}
	was, err := from(older)
	require.NoError(t, err)

	m, err := checkpoint.ReadManifest(newest)
	require.NoError(t, err)
	model := int64(0)
	for i := range m.Tensors {
		model += 4 * m.Tensors[i].Elements(checkpoint.ModelState)
	}
	counted := &countedReads{header: m.Files[0].Header}
	begin.folders = counted
	now, err := from(folder)
	begin.folders = nil
	require.NoError(t, err)
	require.NotEqual(t, was, now)
	require.Equal(t, model, counted.bytes.Load())

	damaged := filepath.Join(newest, m.Files[0].Name)
	text, err := os.ReadFile(damaged)
	require.NoError(t, err)
	text[m.Files[0].Header+40] ^= 1 // the first extents are parameters
	require.NoError(t, os.WriteFile(damaged, text, 0o644))
	require.Empty(t, told)
	now, err = from(folder)
	require.NoError(t, err)
	require.Equal(t, was, now)
	require.Len(t, told, 1, "%v", told)
	require.Contains(t, told[0], "step-00000002 is passed over: "+damaged)
	_, err = from(newest)
	require.ErrorIs(t, err, checkpoint.ErrDamaged)
	require.ErrorContains(t, err, "which stands for its newest whole checkpoint")
}
