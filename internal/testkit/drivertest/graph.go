//go:build linux

package drivertest

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// capture collects the work that a thread enqueues on one stream: launches, copies, fills and Run.
// It refuses operations that order streams and values in memory, although a driver allows some of
// them.
type capture struct {
	stream *stream
	gpu    int
	items  []item
	broken bool // by a forbidden call: it gives no graph
}

// collected is a graph.
type collected struct {
	gpu   int
	items []item
}

// readyGraph is a graph that can be launched.
type readyGraph struct {
	collected
	bytes int64 // of the device, until it is destroyed
}

// refuse invalidates a capture.
func (c *capture) refuse(call, why string) error {
	if c.broken {
		return failure(call, 901, "an earlier call broke the capture")
	}
	c.broken = true
	return failure(call, 900, "%s", why)
}

// add collects an item.
func (c *capture) add(call string, i item) error {
	switch {
	case c.broken:
		return c.refuse(call, "")
	case i.record != nil || i.wait != nil || i.word != nil || i.until != nil:
		return c.refuse(call, "the double captures no order between streams and no values")
	}
	c.items = append(c.items, i)
	return nil
}

// forbidden lists the calls that a thread must not make while it captures, because they wait for
// the device or may do so.
var forbidden = []string{"cuMemAlloc_v2", "cuMemFree_v2", "cuMemHostAlloc", "cuMemFreeHost", "cuModuleLoadDataEx", "cuModuleUnload",
	"cuStreamSynchronize", "cuEventQuery", "cuStreamDestroy_v2", "cuDevicePrimaryCtxRelease_v2", "cuCtxEnablePeerAccess"}

// whileCapturing refuses a call that invalidates the calling thread's capture.
func (d *Driver) whileCapturing(call string) error {
	if c := d.capturing[unix.Gettid()]; c != nil && slices.Contains(forbidden, call) {
		return c.refuse(call, "it may wait for the device, which a capture forbids")
	}
	return nil
}

// BeginCapture begins to collect the work that the calling thread enqueues on a stream.
func (d *Driver) BeginCapture(id driver.Stream) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	const call = "cuStreamBeginCapture_v2"
	if err := d.enter(call); err != nil {
		return err
	}
	if err := d.ownStream(call, id); err != nil {
		return err
	}
	s := d.streams[id]
	if s == nil {
		d.fault("%s on stream %d, which does not exist", call, id)
		return failure(call, 400, "no such stream")
	}
	if s.into != nil || d.capturing[unix.Gettid()] != nil {
		return failure(call, 401, "the stream or the thread captures already")
	}
	s.into = &capture{stream: s, gpu: s.gpu}
	d.capturing[unix.Gettid()] = s.into
	return nil
}

// EndCapture ends a capture and returns its graph.
func (d *Driver) EndCapture(id driver.Stream) (driver.Graph, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	const call = "cuStreamEndCapture"
	s := d.streams[id]
	if s == nil || s.into == nil {
		return 0, failure(call, 401, "the stream does not capture")
	}
	c := s.into
	if d.capturing[unix.Gettid()] != c {
		c.broken = true
		return 0, failure(call, 908, "another thread began the capture")
	}
	s.into = nil
	delete(d.capturing, unix.Gettid())
	if err := d.enter(call); err != nil {
		return 0, err
	}
	if c.broken {
		return 0, failure(call, 901, "a call broke the capture")
	}
	g := driver.Graph(d.handle())
	d.graphs[g] = &collected{c.gpu, c.items}
	return g, nil
}

// DestroyGraph destroys a graph; instances made of it stay.
func (d *Driver) DestroyGraph(g driver.Graph) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	const call = "cuGraphDestroy"
	err := d.teardown(call)
	if d.graphs[g] == nil {
		d.fault("%s of graph %d, which does not exist", call, g)
		return failure(call, 400, "no such graph")
	}
	delete(d.graphs, g)
	return err
}

// Instantiate makes a graph ready to launch, which uses device memory.
func (d *Driver) Instantiate(g driver.Graph) (driver.GraphExec, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	const call = "cuGraphInstantiateWithFlags"
	if err := d.enter(call); err != nil {
		return 0, err
	}
	from := d.graphs[g]
	if from == nil {
		d.fault("%s of graph %d, which does not exist", call, g)
		return 0, failure(call, 400, "no such graph")
	}
	e := &readyGraph{collected: *from}
	if d.opts.GraphBytes != nil {
		e.bytes = d.opts.GraphBytes(len(from.items))
	}
	if err := d.take(call, &d.gpus[from.gpu], e.bytes); err != nil {
		return 0, err
	}
	id := driver.GraphExec(d.handle())
	d.execs[id] = e
	return id, nil
}

// DestroyGraphExec destroys an instance and frees its memory.
func (d *Driver) DestroyGraphExec(id driver.GraphExec) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	const call = "cuGraphExecDestroy"
	err := d.teardown(call)
	e := d.execs[id]
	if e == nil {
		d.fault("%s of graph %d, which does not exist", call, id)
		return failure(call, 400, "no such graph")
	}
	d.gpus[e.gpu].own -= e.bytes
	delete(d.execs, id)
	return err
}

// LaunchGraph enqueues a graph's operations, which occupy one place in the stream.
func (d *Driver) LaunchGraph(id driver.GraphExec, s driver.Stream) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	const call = "cuGraphLaunch"
	if err := d.enter(call); err != nil {
		return err
	}
	if err := d.ownStream(call, s); err != nil {
		return err
	}
	e := d.execs[id]
	if e == nil {
		d.fault("%s of graph %d, which does not exist", call, id)
		return failure(call, 400, "no such graph")
	}
	if d.streams[s] == nil {
		d.fault("%s on stream %d, which does not exist", call, s)
		return failure(call, 400, "no such stream")
	}
	if err := d.own(call, "graph", e.gpu, d.streams[s].gpu); err != nil {
		return err
	}
	placed := false
	for _, i := range e.items {
		i.inGraph = placed && !i.check
		placed = placed || !i.check
		if err := d.push(call, s, i); err != nil {
			return err
		}
	}
	return nil
}
