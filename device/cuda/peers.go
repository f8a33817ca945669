package cuda

import (
	"errors"
	"fmt"
	"time"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// side is a driver stream in addition to the rank's Streams.
type side struct {
	stream driver.Stream
	fence  driver.Event // recorded by Close
}

// SideStream creates a driver stream for copies that run in parallel to the rank's streams.
// The caller must order it with the rank's streams. Close waits for its work and destroys it.
func (c *Context) SideStream() (driver.Stream, error) {
	if c.closed {
		return 0, errClosed
	}
	fence, err := c.api.NewEvent(false)
	if err != nil {
		return 0, fmt.Errorf("rank %d: side stream: %w", c.rank, err)
	}
	s, err := c.api.NewStream()
	if err != nil {
		return 0, fmt.Errorf("rank %d: side stream: %w", c.rank, errors.Join(err, c.api.DestroyEvent(fence)))
	}
	c.sides = append(c.sides, side{s, fence})
	return s, nil
}

// Scratch allocates device memory in addition to the arenas; Close frees it. It is not part of
// the memory plan and does not count against the capacity: the caller must account for it.
func (c *Context) Scratch(bytes int64) (driver.Address, error) {
	if c.closed {
		return 0, errClosed
	}
	at, err := c.api.Alloc(bytes)
	if err != nil {
		return 0, fmt.Errorf("rank %d: %d bytes of device memory for what peers send: %w", c.rank, bytes, err)
	}
	c.scratch = append(c.scratch, at)
	return at, nil
}

// Handle returns the driver's context.
func (c *Context) Handle() driver.Context { return c.handle }

// Await waits until the work before an event's last Record has run; the event may belong to
// any rank. It returns false at the deadline. If the driver cannot query the event, its context
// is lost and Await returns true.
func (c *Context) Await(e driver.Event, deadline time.Time) bool {
	for began, p := time.Now(), (pause{}); ; p.next(began) {
		if done, err := c.api.Done(e); done || err != nil {
			return true
		}
		if time.Now().After(deadline) {
			return false
		}
	}
}

// end waits until a side stream's work has run.
func (c *Context) end(s side, deadline time.Time) error {
	if !c.failed.Load() {
		return nil // the rank's streams have run, so the side work that they waited for has too
	}
	if err := c.api.Record(s.fence, s.stream); err != nil {
		return nil // the context is lost: nothing runs any more
	}
	if !c.Await(s.fence, deadline) {
		return fmt.Errorf("copies from other GPUs still run after %v", closeGrace)
	}
	return nil
}

func (s side) destroy(api driver.API) []error {
	return []error{api.DestroyStream(s.stream), api.DestroyEvent(s.fence)}
}
