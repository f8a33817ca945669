//go:build linux

package nccl_test

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/nccl"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
	"github.com/spillway-ml/spillway/internal/testkit/nccltest"
)

// With NCCL as the only transport, a stopped process is named. The job continues if the process
// resumes, and ends at the timeout if it does not.
func TestHostNamesASilentProcess(t *testing.T) {
	t.Parallel()
	d := drivertest.New(drivertest.Options{Devices: 3})
	f := nccltest.New(d, nccltest.Options{Root: true})
	list, err := d.Devices()
	require.NoError(t, err)
	hosts, worlds := make([]*nccl.Host, 3), make([]*nccl.HostWorld, 3)
	warned := make(chan string, 16)
	var wg sync.WaitGroup
	each := func(do func(i int) error) {
		for i := range hosts {
			wg.Go(func() {
				if err := do(i); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
	each(func(i int) (err error) {
		if hosts[i], err = nccl.StartHost(f.Library(22105), d, list[i], i, 3, false); err != nil {
			return err
		}
		worlds[i], err = hosts[i].Join(ranksOf(3), 8*time.Second, func(text string) {
			if i == 0 {
				warned <- text
			}
			if i > 0 && !strings.Contains(text, "or waits for a rank that gives none and that it names") {
				t.Error(text)
			}
		})
		return err
	})
	each(func(i int) error {
		said, err := worlds[i].Gather(i, []byte{byte(i)})
		if err == nil && (len(said) != 3 || said[2][0] != 2) {
			err = fmt.Errorf("%v", said)
		}
		return err
	})
	_, err = hosts[2].Stream(0).Write([]byte("from two"))
	require.NoError(t, err)
	b := make([]byte, 8)
	_, err = io.ReadFull(hosts[0].Stream(2), b)
	require.NoError(t, err)
	require.Equal(t, "from two", string(b))

	f.Hold(1, true)
	for !strings.Contains(<-warned, "rank 1 (host ") { // another may have had to wait for a core
	}
	f.Hold(1, false)
	each(func(i int) error { // the process resumes
		_, err := worlds[i].Gather(i, []byte{1})
		return err
	})
	require.NoError(t, worlds[0].Err())
	f.Hold(1, true)
	ended, other := make(chan error, 1), make(chan error, 1)
	worlds[0].OnError(func(err error) { ended <- err })
	worlds[2].OnError(func(err error) { other <- err })
	err = <-ended
	require.ErrorIs(t, err, comm.ErrTimeout)
	require.ErrorContains(t, err, "rank 1 (host ")
	err = <-other // it cannot know which rank rank 0 waits for
	require.ErrorIs(t, err, comm.ErrTimeout)
	require.ErrorContains(t, err, "or waits for a rank that gives none and that it names")
	f.Hold(1, false)
	each(func(i int) error { return hosts[i].Close() })
	require.NoError(t, f.Close())
	require.NoError(t, d.Close())
}

// With NCCL as the only transport, the remaining processes continue without lost ones, in their old
// order, down to one process. An earlier world reports nothing more.
func TestHostShrinks(t *testing.T) {
	d := drivertest.New(drivertest.Options{Devices: 4})
	f := nccltest.New(d, nccltest.Options{Root: true, Looks: 2})
	list, err := d.Devices()
	require.NoError(t, err)
	hosts := make([]*nccl.Host, 4)
	each := func(who []int, do func(i int) error) {
		t.Helper()
		var wg sync.WaitGroup
		for _, i := range who {
			wg.Go(func() {
				if err := do(i); err != nil {
					t.Errorf("process %d: %v", i, err)
				}
			})
		}
		wg.Wait()
		require.False(t, t.Failed())
	}
	all := []int{0, 1, 2, 3}
	each(all, func(i int) (err error) {
		hosts[i], err = nccl.StartHost(f.Library(nccl.ShrinkVersion), d, list[i], i, 4, true)
		return err
	})
	require.ErrorContains(t, hosts[0].Shrink([]int{1}), "no rank is lost")
	// meet makes the remaining processes join a new world.
	meet := func(who []int) map[int]*nccl.HostWorld {
		worlds := make([]*nccl.HostWorld, 4)
		each(who, func(i int) (err error) {
			rank, size := hosts[i].Place()
			if size != len(who) || who[rank] != i {
				return fmt.Errorf("rank %d of %d among %v", rank, size, who)
			}
			if worlds[i], err = hosts[i].Join(ranksOf(size), time.Minute, nil); err != nil {
				return err
			}
			said, err := worlds[i].Gather(rank, []byte{byte(i)})
			for r := range said {
				if said[r][0] != byte(who[r]) {
					return fmt.Errorf("rank %d says %d", r, said[r])
				}
			}
			return err
		})
		of := map[int]*nccl.HostWorld{}
		for _, i := range who {
			of[i] = worlds[i]
		}
		return of
	}
	// lose ends a world with an error that NCCL found in one process, and continues with the
	// processes in stay.
	lose := func(worlds map[int]*nccl.HostWorld, without []int, stay []int) {
		ended := make(chan error, len(worlds))
		for _, w := range worlds {
			w.OnError(func(err error) { ended <- err })
		}
		worlds[stay[len(stay)-1]].Abort(fmt.Errorf("%w: as told", comm.ErrLost))
		for range worlds {
			require.ErrorIs(t, <-ended, comm.ErrLost)
		}
		each(stay, func(i int) error {
			if _, err := hosts[i].Loss(); !errors.Is(err, comm.ErrLost) {
				return fmt.Errorf("lost: %w", err)
			}
			return hosts[i].Shrink(without)
		})
		for i, w := range worlds {
			if !slices.Contains(stay, i) {
				require.NoError(t, hosts[i].Close())
				continue
			}
			w.Abort(errors.New("too late"))
			w.Show(0, 0, watch.Progress{})
			require.ErrorIs(t, w.Err(), comm.ErrAborted)
			_, err := w.Gather(0, nil)
			require.Error(t, err)
			_, err = w.Communicator()
			require.Error(t, err)
			require.NoError(t, w.Close())
			_, err = hosts[i].Loss()
			require.NoError(t, err)
		}
	}
	worlds := meet(all)
	for _, without := range [][]int{nil, {-1}, {4}, {0}} {
		require.Error(t, hosts[0].Shrink(without))
	}
	lose(worlds, []int{1}, []int{0, 2, 3})
	worlds = meet([]int{0, 2, 3})
	lose(worlds, []int{1}, []int{0, 3}) // process 2
	worlds = meet([]int{0, 3})
	lose(worlds, []int{1}, []int{0})
	meet([]int{0})
	require.NoError(t, hosts[0].Close())
	require.NoError(t, f.Close())
	require.NoError(t, d.Close())
}

// The remaining processes must agree on the lost ones. If another is lost while they meet, they
// wait for the usual timeout. Both cases end with an error.
func TestHostShrinksInVain(t *testing.T) {
	t.Parallel()
	d := drivertest.New(drivertest.Options{Devices: 3})
	f := nccltest.New(d, nccltest.Options{Root: true})
	list, err := d.Devices()
	require.NoError(t, err)
	hosts, worlds := make([]*nccl.Host, 3), make([]*nccl.HostWorld, 3)
	var wg sync.WaitGroup
	for i := range hosts {
		wg.Go(func() {
			var err error
			if hosts[i], err = nccl.StartHost(f.Library(nccl.ShrinkVersion), d, list[i], i, 3, true); err == nil {
				worlds[i], err = hosts[i].Join(ranksOf(3), 2*time.Second, nil)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	require.False(t, t.Failed())
	ended := make(chan error, 3)
	for _, w := range worlds {
		w.OnError(func(err error) { ended <- err })
	}
	worlds[0].Abort(fmt.Errorf("%w: as told", comm.ErrLost))
	for range worlds {
		<-ended
	}
	require.ErrorIs(t, hosts[0].Shrink([]int{1}), comm.ErrTimeout) // process 2 does not join
	require.ErrorContains(t, hosts[2].Shrink([]int{0}), "without")
	require.ErrorContains(t, f.Found(), "rank 2 goes on without [0], and others without [1]")
	for _, h := range hosts {
		require.NoError(t, h.Close())
	}
	require.NoError(t, f.Close())
	require.NoError(t, d.Close())
}

// A library without ncclCommShrink is refused before any communicator is made.
func TestHostNeedsALibraryThatShrinks(t *testing.T) {
	d := drivertest.New(drivertest.Options{Devices: 1})
	f := nccltest.New(d, nccltest.Options{})
	list, err := d.Devices()
	require.NoError(t, err)
	_, err = nccl.StartHost(f.Library(22105), d, list[0], 0, 2, true)
	require.ErrorContains(t, err, "has no ncclCommShrink: want 2.27.0 or later")
	require.Empty(t, f.Calls())
	require.NoError(t, d.Close())
}
