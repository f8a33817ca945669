package nccl

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spillway-ml/spillway/comm/world"

	"github.com/spillway-ml/spillway/comm"
)

// Loss is the error of a job that has ended because of a rank that died, fell silent or
// can't be reached; nil of any other end, and while the job is sound. suspect is the rank
// that this one, rank 0, has had no answer of for the timeout: −1 where it does not know.
func (h *Host) Loss() (suspect int, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if errors.Is(h.err, comm.ErrLost) || errors.Is(h.err, comm.ErrTimeout) {
		return h.suspect, h.err
	}
	return -1, nil
}

// Where says where the process of a rank runs, as far as it has told; "" where it has not.
func (h *Host) Where(rank int) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.where[rank]
}

// Place is the host's rank, and how many there are.
func (h *Host) Place() (rank, world int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.rank, h.world
}

// loss tells whether a block says that the job has ended because of a rank that is lost. The
// two that swap it make no more rounds with each other then, where they may go on with fewer.
func (l *letter) loss() bool {
	err := world.Told(l.Kind, l.Err)
	return l.Err != "" && (errors.Is(err, comm.ErrLost) || errors.Is(err, comm.ErrTimeout))
}

// suspects is told of a peer with which a swap has failed. One that was only left less time
// for its answer, because the job had ended, is none.
func (h *Host) suspects(peer int, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err == nil || !errors.Is(err, comm.ErrTimeout) || time.Since(h.heard[peer]) > h.timeout {
		h.suspect = peer
	}
}

// Shrink makes a host that has lost ranks one of those that are left, by ncclCommShrink. All
// of them call it, with the same ranks to go on without; nothing of the World that there was
// is used any more. Ranks are counted anew, in the order that they had: see Place. It takes at
// most about as long as a rank may keep others waiting, also where another one is lost
// meanwhile; after an error the host is only to be closed.
func (h *Host) Shrink(without []int) error {
	h.mu.Lock()
	rank, world, timeout, err := h.rank, h.world, h.timeout, h.err
	h.mu.Unlock()
	without = slices.Compact(slices.Sorted(slices.Values(without)))
	switch {
	case !h.shrinks:
		return errors.New("nccl: the host was not started as one that shrinks")
	case err == nil:
		return errors.New("nccl: no rank is lost")
	case len(without) == 0 || without[0] < 0 || without[len(without)-1] >= world || slices.Contains(without, rank):
		return fmt.Errorf("nccl: rank %d of %d can't go on without %v", rank, world, without)
	}
	o := order{without, make(chan error, 1)}
	late := time.After(timeout + leaveGrace)
	select {
	case h.orders <- o:
	case <-h.ended:
		return errors.New("nccl: the host has ended")
	case <-late: // an abort that does not come back
		return fmt.Errorf("%w: nccl: what has been aborted does not end", comm.ErrTimeout)
	}
	select {
	case err = <-o.done:
	case <-late:
		err = fmt.Errorf("%w: ncclCommShrink does not come back", comm.ErrTimeout)
	}
	if err != nil {
		return fmt.Errorf("nccl: rank %d of %d goes on without %v: %w", rank, world, without, err)
	}
	return nil
}

// goOn waits, once no more rounds are made, until the host is to go on with fewer ranks, and
// makes it so; false: it is to end. What has run is ended at once, so that no kernel
// of it keeps the GPU.
func (h *Host) goOn() bool {
	if !h.shrinks {
		return false
	}
	h.mu.Lock()
	sound := h.err == nil
	h.mu.Unlock()
	if sound {
		return false
	}
	h.quiet()
	for _, c := range []*communicator{&h.data, &h.control} {
		h.drop(c)
	}
	select {
	case o := <-h.orders:
		err := h.shrink(o.without)
		o.done <- err
		return err == nil
	case <-h.leaving:
		return false
	}
}

// drop aborts a communicator.
func (h *Host) drop(c *communicator) {
	h.mu.Lock()
	handle := c.handle
	c.handle = 0
	h.mu.Unlock()
	if handle != 0 {
		_ = h.api.Abort(handle) // whose ranks are not all there
	}
}

// shrink is Shrink on the host's thread.
func (h *Host) shrink(without []int) (err error) {
	if err := h.gpu.Synchronize(h.stream); err != nil { // an abort has ended what it ran
		return err
	}
	h.mu.Lock()
	h.gen++
	streams := h.streams
	before := 0
	for _, r := range without {
		if r < h.rank {
			before++
		}
	}
	h.of(h.rank-before, h.world-len(without))
	for _, s := range streams {
		s.room.Broadcast()
	}
	h.cond.Broadcast()
	h.mu.Unlock()
	defer func() {
		if err != nil {
			h.fail(err)
		}
	}()
	next := &communicator{}
	if err := h.api.Shrink(h.root.handle, without, &next.handle, Config{CTAs: 1}); err != nil {
		return err
	}
	for _, c := range []*communicator{&h.root, next} {
		if err := h.settle(c, "ncclCommShrink"); err != nil {
			if c == &h.root {
				return err // next is not there
			}
			h.drop(next)
			return err
		}
	}
	if next.handle == 0 {
		return errors.New("ncclCommShrink has made no communicator")
	}
	h.drop(&h.root)
	h.root.handle = next.handle
	if err := h.divide(); err != nil {
		return err
	}
	h.met()
	return nil
}
