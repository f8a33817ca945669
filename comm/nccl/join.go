package nccl

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/world"
	"github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/crash"
)

// New returns the world of a mesh's ranks. Each process calls Groups for its own ranks.
func New(mesh []graph.Axis, o Options) (*World, error) {
	if o.API == nil || o.Control == nil || o.Sum == nil {
		return nil, errors.New("nccl: want a library, a control and sums")
	}
	o.Timeout = cmp.Or(max(o.Timeout, 0), world.DefaultTimeout)
	w := &World{o: o}
	var err error
	if w.size, w.groups, err = world.Groups("nccl", mesh); err != nil {
		return nil, err
	}
	w.chunk = chunkOf(w.size)
	o.Control.OnError(w.abort)
	return w, nil
}

// hello is the information that ranks exchange first.
type hello struct {
	Version int
	GPU     string // its UUID
	Name    string
	Host    string
	ID      []byte `json:",omitempty"` // rank 0's
	Err     string `json:",omitempty"`
}

// Groups creates a rank's communicators, together with the other processes, and returns its
// memberships by mesh axis, −1 for all ranks. ctx is the rank's context; call Groups and the
// groups' methods on its goroutine. Closing ctx frees the communicators.
func (w *World) Groups(ctx *cuda.Context) (map[int]comm.Group, error) {
	r := &rank{w: w, index: ctx.Rank(), ctx: ctx, sums: map[sumKey]Sum{}, left: make(chan struct{}), watched: make(chan struct{})}
	if r.index < 0 || r.index >= w.size {
		return nil, fmt.Errorf("nccl: rank %d of %d ranks", r.index, w.size)
	}
	fail := func(err error) (map[int]comm.Group, error) {
		close(r.watched)
		if r.w.o.Control.Err() == nil { // the others wait for it
			r.w.o.Control.Abort(fmt.Errorf("rank %d: %w", r.index, err))
		}
		return nil, fmt.Errorf("nccl: rank %d: %w", r.index, errors.Join(err, r.close()))
	}
	w.mu.Lock()
	w.ranks = append(w.ranks, r)
	w.mu.Unlock()
	if err := r.join(); err != nil {
		return fail(err)
	}
	for _, g := range w.groups {
		if i := slices.Index(g.Ranks, r.index); i >= 0 {
			if err := r.addMember(g, i); err != nil {
				return fail(err)
			}
		}
	}
	if err := r.rehearse(); err != nil {
		return fail(err)
	}
	ctx.AtClose(r.close)
	go r.watch()
	groups := map[int]comm.Group{}
	for slot, m := range r.members {
		groups[slot-1] = m
	}
	return groups, nil
}

// join exchanges information with the other ranks and creates the communicator of all ranks.
func (r *rank) join() error {
	all, err := r.greet()
	if err != nil || r.w.size == 1 {
		return err
	}
	var id ID
	if n := copy(id[:], all[0].ID); n != IDBytes && r.w.o.World == 0 {
		return fmt.Errorf("rank 0 has sent an NCCL identifier of %d bytes, want %d", n, IDBytes)
	}
	api := r.ctx.Driver()
	before, _, err := api.MemInfo()
	if err != nil {
		return err
	}
	r.world = r.newComm()
	if r.world.handle = r.w.o.World; r.world.handle != 0 {
		err = nil // it is there
	} else if err := r.call(func() error { return r.w.o.API.Init(&r.world.handle, r.w.size, id, r.index, Config{Share: true}) }); err != nil {
		return err
	}
	if err := r.settle(r.world, "join the communicator of all ranks"); err != nil {
		return err
	}
	if r.scratch, err = api.Alloc(ScratchBytes(r.w.size)); err != nil {
		return fmt.Errorf("%d bytes of scratch memory: %w", ScratchBytes(r.w.size), err)
	}
	r.took = before
	return nil
}

// greet exchanges hello with the other ranks. If the ranks cannot form one job, every rank
// returns an error.
func (r *rank) greet() ([]hello, error) {
	gpu := r.ctx.GPU()
	own := hello{GPU: fmt.Sprintf("%x", gpu.UUID), Name: gpu.Name}
	own.Host, _ = os.Hostname()
	var err error
	if own.Version, err = r.w.o.API.Version(); err == nil && r.index == 0 && r.w.size > 1 && r.w.o.World == 0 {
		var id ID
		id, err = r.w.o.API.UniqueID()
		own.ID = id[:]
	}
	if err != nil {
		own.Err = err.Error()
		own.Err = own.Err[:min(len(own.Err), helloBytes/4)]
	}
	text, err := json.Marshal(own)
	if err != nil || len(text) > helloBytes {
		return nil, fmt.Errorf("it can't say who it is in %d bytes: %w", helloBytes, err)
	}
	said, err := r.w.o.Control.Gather(r.index, append(text, make([]byte, helloBytes-len(text))...))
	if err != nil {
		return nil, err
	}
	all := make([]hello, len(said))
	for i, b := range said {
		text, _, _ := bytes.Cut(b, []byte{0}) // zeros fill the block
		if err := json.Unmarshal(text, &all[i]); err != nil {
			return nil, fmt.Errorf("what rank %d says of itself: %w", i, err)
		}
	}
	if len(all) != r.w.size {
		return nil, fmt.Errorf("%d ranks said who they are, want %d", len(all), r.w.size)
	}
	return all, compatible(all)
}

// compatible returns an error if the ranks cannot share one communicator.
func compatible(all []hello) error {
	on := map[string]int{}
	for i, h := range all {
		switch first := all[0]; {
		case h.Err != "":
			return fmt.Errorf("rank %d (host %s): %s", i, h.Host, h.Err)
		case h.Version != first.Version:
			return fmt.Errorf("rank 0 (host %s) has NCCL %s, rank %d (host %s) has %s: install one version everywhere",
				first.Host, VersionText(first.Version), i, h.Host, VersionText(h.Version))
		}
		at := h.Host + " " + h.GPU
		if other, taken := on[at]; taken {
			return fmt.Errorf("ranks %d and %d both have the GPU %s with UUID %s of host %s: NCCL wants a GPU for each rank; "+
				"start no more processes on a host than it has GPUs, "+
				"or run the ranks of a GPU in one process", other, i, h.Name, h.GPU, h.Host)
		}
		on[at] = i
	}
	return nil
}

// abort frees the communicators of all ranks of this process and stops their operations. A
// stream continues after a stopped operation as if it were complete, so the rank's error must be
// set first.
func (w *World) abort(err error) {
	w.mu.Lock()
	ranks := slices.Clone(w.ranks)
	w.mu.Unlock()
	flights := make([]string, len(ranks))
	for i, r := range ranks {
		flights[i] = r.flight(flightCalls)
	}
	for _, r := range ranks {
		r.ctx.Abort(err)
	}
	told := make(chan struct{})
	go func() { // the reader of the text may be slow, and an abort may never return
		defer crash.Guard()
		defer close(told)
		for _, flight := range flights {
			if flight != "" && w.o.Failed != nil {
				w.o.Failed(flight)
			}
		}
	}()
	for _, r := range ranks {
		r.abort()
	}
	<-told
}

// flightCalls is the number of recent calls of each group that a rank lists after a failure.
const flightCalls = 3
