package nccl

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"
	"unsafe"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/internal/crash"
)

// StartHost makes this process run the given rank. The ranks find each other by the address
// in NCCL_COMM_ID, which UniqueID returns on each of them. shrinks must be the same on all
// ranks.
func StartHost(api API, gpu driver.API, device driver.Device, rank, world int, shrinks bool) (*Host, error) {
	if shrinks {
		if err := api.Shrinks(); err != nil {
			return nil, fmt.Errorf("nccl: to go on with fewer ranks: %w", err)
		}
	}
	h := &Host{api: api, gpu: gpu, device: device, shrinks: shrinks, block: max(leastBlock, helloInBlock*int64(world)+blockReserve), orders: make(chan order),
		wake: make(chan struct{}, 1), ended: make(chan struct{}), leaving: make(chan struct{}), warn: func(string) {}, timeout: hostTimeout}
	h.cond = sync.NewCond(&h.mu)
	h.of(rank, world)
	began := make(chan error)
	go func() {
		defer crash.Guard()
		runtime.LockOSThread() // never unlocked: the GPU's context is current on this thread
		defer close(h.ended)
		err := h.open()
		began <- err
		if err == nil {
			for h.rounds(); h.goOn(); h.rounds() {
			}
			h.close()
		}
	}()
	return h, <-began
}

// open creates the communicators and allocates memory, on the host's thread.
func (h *Host) open() error {
	handle, err := h.gpu.Retain(h.device.Ordinal)
	if err == nil {
		err = h.gpu.SetCurrent(handle)
	}
	if err != nil {
		return fmt.Errorf("nccl: GPU %d: %w", h.device.Ordinal, err)
	}
	first := &h.control
	if h.shrinks {
		first = &h.root
	}
	id, err := h.api.UniqueID()
	if err == nil {
		err = h.api.Init(&first.handle, h.world, id, h.rank, Config{CTAs: 1})
	}
	if err == nil {
		err = h.settle(first, "meet the other processes")
	}
	if err == nil {
		err = h.divide()
	}
	if err == nil {
		err = h.memory()
	}
	if err != nil {
		h.close()
		return fmt.Errorf("nccl: rank %d of %d: %w", h.rank, h.world, err)
	}
	h.met()
	return nil
}

func (h *Host) memory() (err error) {
	if h.stream, err = h.gpu.NewStream(); err != nil {
		return err
	}
	if h.event, err = h.gpu.NewEvent(false); err != nil {
		return err
	}
	if h.near, err = h.gpu.Alloc(2 * h.block); err != nil {
		return err
	}
	p, _, err := h.gpu.HostAlloc(2 * h.block)
	if err == nil {
		h.pinned = unsafe.Slice((*byte)(p), 2*h.block)
	}
	return err
}

// close frees the host's communicators and memory, on the host's thread.
func (h *Host) close() {
	sound := h.quiet()
	for _, c := range []*communicator{&h.data, &h.control, &h.root} {
		if c.handle == 0 {
			continue
		}
		err := errors.New("the job has ended")
		if sound {
			if err = h.api.Finalize(c.handle); err == nil {
				err = h.settle(c, "end a communicator")
			}
			if err == nil {
				err = h.api.Destroy(c.handle)
			}
		}
		if err != nil {
			_ = h.api.Abort(c.handle) // an error changes nothing: the process ends
		}
		c.handle = 0
	}
	if h.stream != 0 {
		_ = h.gpu.Synchronize(h.stream) // Abort has stopped the stream's NCCL kernels
		_ = h.gpu.DestroyStream(h.stream)
	}
	if h.event != 0 {
		_ = h.gpu.DestroyEvent(h.event)
	}
	if h.near != 0 {
		_ = h.gpu.Free(h.near)
	}
	if h.pinned != nil {
		_ = h.gpu.HostFree(unsafe.Pointer(&h.pinned[0]))
	}
	_ = h.gpu.Release(h.device.Ordinal)
}

// Close ends this process's part of the job. It waits a limited time for the other
// processes to end theirs.
func (h *Host) Close() error {
	h.leave.Do(func() { close(h.leaving) })
	h.rouse()
	select {
	case <-h.ended:
		return nil
	case <-time.After(leaveGrace):
	}
	h.fail(fmt.Errorf("%w: a process does not leave", comm.ErrTimeout))
	select {
	case <-h.ended:
	case <-time.After(leaveGrace):
	}
	return nil
}
