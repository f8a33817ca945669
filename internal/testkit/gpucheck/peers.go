package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// visible is the environment variable that limits the GPUs that the driver shows.
const visible = "CUDA_VISIBLE_DEVICES"

// oneGPU returns the environment in which a program sees only the first GPU.
func oneGPU() []string {
	first, _, _ := strings.Cut(os.Getenv(visible), ",")
	if first == "" {
		first = "0"
	}
	return []string{visible + "=" + first}
}

// runPeers measures copies between GPUs, and trains on all of them with the same bits as on one.
func runPeers(ctx context.Context, b *bundle, r *result) {
	if b.gpu == nil {
		r.skip("on the CPU there are no GPUs to exchange anything")
		return
	}
	if b.gpu.count < 2 {
		r.skip("one GPU: it has nobody to exchange anything with")
		return
	}
	r.contact(b.execute(ctx, "peers", b.work, nil, b.self, "-child", "peers"))
	dir, data, err := b.model("tiny", tinyShape)
	if err != nil {
		r.fail("%v", err)
		return
	}
	for _, ranks := range slices.Compact([]int{2, b.gpu.count, 2 * b.gpu.count}) {
		b.bitsOverGPUs(ctx, r, ranks, []string{"--model", dir, "--init", dir, "--data", data, "--steps", "4", "--batch", "2", "--seq", "64", "--ranks", number(ranks)})
	}
}

// bitsOverGPUs trains on one GPU, and with every stage on all GPUs, and compares the bits.
func (b *bundle) bitsOverGPUs(ctx context.Context, r *result, ranks int, args []string) {
	if ranks > b.gpu.count && ranks%b.gpu.count != 0 || ranks > mostRanks {
		return
	}
	want, err := b.trainIn(ctx, oneGPU(), fmt.Sprintf("peers-%d-one", ranks), append(slices.Clone(args), "--zero", "0")...)
	if err != nil {
		r.fail("%d ranks on one GPU: %v", ranks, err)
		return
	}
	same := 0
	for i, v := range variants() {
		got, err := b.trainIn(ctx, nil, fmt.Sprintf("peers-%d-%d", ranks, i), append(slices.Clone(args), v.flags...)...)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			r.fail("%d ranks on %d GPUs, %s: %v", ranks, min(ranks, b.gpu.count), v.name, err)
		case got.peaks() != "":
			r.fail("%d ranks on %d GPUs, %s: %s", ranks, min(ranks, b.gpu.count), v.name, got.peaks())
		case !sameBits(want, got):
			r.fail("%d ranks on %d GPUs, %s: other bits than on one", ranks, min(ranks, b.gpu.count), v.name)
		default:
			same++
		}
	}
	r.say("%d ranks on %d GPUs: %d of %d ways have the bits of one GPU, planned = touched", ranks, min(ranks, b.gpu.count), same, len(variants()))
}

// mostRanks is the largest number of ranks of a process on GPUs.
const mostRanks = 64

// peerEnd is a GPU that exchanges data with others.
type peerEnd struct {
	ctx      driver.Context
	stream   driver.Stream
	out, in  driver.Address // what it sends and gets, c.bytes each
	retained bool
}

// peers measures copies between every two GPUs: peer access, the rate of a large copy, the time of
// a small one, and the rate in both directions at once.
func (c *contacts) peers() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	list, err := c.api.Devices()
	if !c.step("cuDeviceGetCount", func() (string, error) { return number(len(list)), err }) {
		return
	}
	ends := make([]peerEnd, len(list))
	ok := true
	for i := range ends {
		ok = ok && c.step(fmt.Sprintf("GPU %d: context, stream, %d bytes", i, 2*c.bytes), func() (string, error) { return "", c.openEnd(i, &ends[i]) })
	}
	for i := range ends {
		for j := range ends {
			if ok && i != j {
				c.step(fmt.Sprintf("GPU %d to GPU %d", i, j), func() (string, error) { return c.oneWay(ends, i, j) })
			}
		}
	}
	for i := range ends {
		for j := range i {
			if ok {
				c.step(fmt.Sprintf("GPUs %d and %d, both ways at once", j, i), func() (string, error) { return c.bothWays(&ends[j], &ends[i]) })
			}
		}
	}
	for i := range ends {
		c.step(fmt.Sprintf("GPU %d: given back", i), func() (string, error) { return "", c.closeEnd(i, &ends[i]) })
	}
}

func (c *contacts) openEnd(i int, e *peerEnd) (err error) {
	if e.ctx, err = c.api.Retain(i); err != nil {
		return err
	}
	e.retained = true
	if err := c.api.SetCurrent(e.ctx); err != nil {
		return err
	}
	if e.stream, err = c.api.NewStream(); err != nil {
		return err
	}
	for _, at := range []*driver.Address{&e.out, &e.in} {
		if *at, err = c.api.Alloc(c.bytes); err != nil {
			return err
		}
	}
	return errors.Join(c.api.Fill8(e.out, byte(i), c.bytes, e.stream), c.api.Synchronize(e.stream))
}

func (c *contacts) closeEnd(i int, e *peerEnd) (err error) {
	if !e.retained {
		return nil
	}
	if err := c.api.SetCurrent(e.ctx); err != nil {
		return errors.Join(err, c.api.Release(i))
	}
	if e.stream != 0 {
		err = c.api.DestroyStream(e.stream)
	}
	for _, at := range []driver.Address{e.out, e.in} {
		if at != 0 {
			err = errors.Join(err, c.api.Free(at))
		}
	}
	return errors.Join(err, c.api.Release(i))
}

// oneWay copies from GPU i to GPU j, on i's stream.
func (c *contacts) oneWay(ends []peerEnd, i, j int) (string, error) {
	from, to := &ends[i], &ends[j]
	if err := c.api.SetCurrent(from.ctx); err != nil {
		return "", err
	}
	way := "through the host"
	can, err := c.api.CanAccessPeer(i, j)
	if can && err == nil {
		can, err = c.api.EnablePeerAccess(to.ctx)
	}
	if err != nil {
		return "", err
	}
	if can {
		way = "direct"
	}
	c.stream = from.stream
	copied := func(n int64) (time.Duration, error) {
		return c.timed(func() error { return c.api.CopyPeer(to.in, to.ctx, from.out, from.ctx, n, from.stream) })
	}
	large, err := copied(c.bytes)
	if err != nil {
		return "", err
	}
	small, err := copied(4096)
	return fmt.Sprintf("%s, %s, %.1f µs for 4 KiB", way, rate(c.bytes, large), micro(small)), err
}

// bothWays copies in both directions at once.
func (c *contacts) bothWays(a, b *peerEnd) (string, error) {
	const times = 5
	start := time.Now()
	for range times {
		for _, w := range [][2]*peerEnd{{a, b}, {b, a}} {
			if err := errors.Join(c.api.SetCurrent(w[0].ctx), c.api.CopyPeer(w[1].in, w[1].ctx, w[0].out, w[0].ctx, c.bytes, w[0].stream)); err != nil {
				return "", err
			}
		}
	}
	err := errors.Join(c.api.Synchronize(a.stream), c.api.Synchronize(b.stream))
	return rate(2*times*c.bytes, time.Since(start)) + " together", err
}
