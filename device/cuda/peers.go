package cuda

import (
	"errors"
	"fmt"
	"time"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// side is a stream of the driver's beside the rank's own.
type side struct {
	stream driver.Stream
	fence  driver.Event // recorded by Close
}

// SideStream returns a stream of the driver's for copies that run beside one of the rank's
// streams. Close waits for what it holds and gives it back. Who uses it orders it with the
// rank's streams.
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

// Scratch returns device memory beside the arenas, which Close gives back. It is outside
// the plan and the capacity: who takes it has counted it as such.
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

// Await returns when what was before an event's last Record has run, whichever rank's
// that is, or says at the deadline that it has not. An event that the driver does not tell
// about counts as passed: its context is lost.
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

// end waits until a side stream has run what it holds.
func (c *Context) end(s side, deadline time.Time) error {
	if !c.failed.Load() {
		return nil // the rank's streams have run, and with them what they wait for of this one
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
