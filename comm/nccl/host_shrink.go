package nccl

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spillway-ml/spillway/comm/world"

	"github.com/spillway-ml/spillway/comm"
)

// Loss returns the error of a job that ended because a rank died, fell silent or cannot be
// reached. It returns nil if the job ended otherwise or has not ended. On rank 0 suspect is the
// rank that has not answered within the timeout; −1 if unknown.
func (h *Host) Loss() (suspect int, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if errors.Is(h.err, comm.ErrLost) || errors.Is(h.err, comm.ErrTimeout) {
		return h.suspect, h.err
	}
	return -1, nil
}

// Where returns the host and process of a rank, "" if the rank has not reported them.
func (h *Host) Where(rank int) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.where[rank]
}

// Place returns the rank of this process and the number of ranks.
func (h *Host) Place() (rank, world int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.rank, h.world
}

// loss tells whether a block reports that the job ended because a rank is lost. If the
// host shrinks, the two ranks that exchanged the block then stop their rounds.
func (l *letter) loss() bool {
	err := world.Told(l.Kind, l.Err)
	return l.Err != "" && (errors.Is(err, comm.ErrLost) || errors.Is(err, comm.ErrTimeout))
}

// suspects records a peer as suspect after a failed swap. It does not if the peer only had
// less time to answer because the job had ended.
func (h *Host) suspects(peer int, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err == nil || !errors.Is(err, comm.ErrTimeout) || time.Since(h.heard[peer]) > h.timeout {
		h.suspect = peer
	}
}

// Shrink continues a host that has lost ranks with the remaining ones, by ncclCommShrink.
// All remaining ranks call it with the same list of lost ranks. The previous World must not be
// used any more. Ranks are renumbered in their old order: see Place. Shrink takes at most
// about the job's timeout, even if another rank is lost meanwhile. After an error the host can
// only be closed.
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
	case <-late: // ncclCommAbort has not returned
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

// goOn runs after the rounds have stopped. It aborts the communicators at once, so that no
// waiting kernel occupies the GPU. Then it waits for a request of Shrink and executes it; it
// returns false if the host is to end instead.
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
		_ = h.api.Abort(handle) // an error is expected: some of its ranks are lost
	}
}

// shrink is Shrink on the host's thread.
func (h *Host) shrink(without []int) (err error) {
	if err := h.gpu.Synchronize(h.stream); err != nil { // Abort has stopped the stream's NCCL kernels
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
				return err // next was not created
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
