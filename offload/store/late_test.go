package store

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// stuckFile blocks every write until release is closed.
type stuckFile struct {
	RawFile
	entered, release chan struct{}
}

func (s *stuckFile) WriteAt(b []byte, off int64) (int, error) {
	s.entered <- struct{}{}
	<-s.release
	return s.RawFile.WriteAt(b, off)
}

// A write that the system completes after Close finds its file's state intact, and then closes the
// file. A request made after Close is refused.
func TestARequestThatComesBackAfterClose(t *testing.T) {
	for name, o := range map[string]Options{"plain": small(), "cached": {Block: small().Block, Depth: small().Depth, Cache: 1 << 20}} {
		t.Run(name, func(t *testing.T) {
			held := &stuckFile{entered: make(chan struct{}, 16), release: make(chan struct{})}
			o.grace = time.Millisecond
			o.Wrap = func(_ int, f RawFile) RawFile {
				held.RawFile = f
				return held
			}
			folder, err := Open(t.TempDir(), o)
			require.NoError(t, err)
			f, err := folder.create(0, 1<<16, 0, o.Cache)
			require.NoError(t, err)
			mem := make([]byte, 3000) // part of a granule, so its checksum is computed after the write began
			done := make(chan error, 1)
			go func() { done <- f.Store(mem, 100).Run() }()
			<-held.entered
			require.ErrorContains(t, folder.Close(), "a request is still running")
			require.NotNil(t, f.sums, "the request's state is there")
			require.ErrorIs(t, f.Load(mem, 0).Run(), os.ErrClosed)
			require.False(t, f.queue.send(job{}), "a late rank is refused, not a panic")

			close(held.release)
			require.NoError(t, <-done)
			f.queue.workers.Wait()
			require.Nil(t, f.sums, "the last request shut the file")
		})
	}
}
