package main

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/offload/store"
)

// spinner computes for 2 ms an index, as a kernel's task may, without a call
// that would let another goroutine in.
type spinner struct{ done atomic.Int64 }

func (s *spinner) RunIndex(int) {
	for start := time.Now(); time.Since(start) < 2*time.Millisecond; {
		if spin() < 0 { // never: the result must look used
			return
		}
	}
	s.done.Add(1)
}

//go:noinline
func spin() float64 {
	x := 1.0
	for j := range 1000 {
		x = x*0.999 + float64(j)
	}
	return x
}

// busy prints what the disk tier reaches with idle and with computing cores, for
// several numbers of the runtime's processors (GOMAXPROCS): a worker whose call
// returns needs one, and where kernels have them all it waits for up to a time
// slice of 10 ms.
func busy(dir string, o store.Options, rounds int) (err error) {
	const size, window = 512 << 20, 64 << 20
	cores := runtime.NumCPU()
	folder, err := store.Open(dir, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, folder.Close()) }()
	ctx := cpu.New(0, cpu.Options{Pin: true, Disk: folder.Create})
	defer func() { err = errors.Join(err, ctx.Close()) }()
	host, err := ctx.Alloc(graph.Host, window)
	if err != nil {
		return err
	}
	disk, err := ctx.Alloc(graph.Disk, size)
	if err != nil {
		return err
	}
	s, err := ctx.NewStream(graph.CopyIn)
	if err != nil {
		return err
	}
	var in, out []device.Kernel
	for off := int64(0); off < size; off += window {
		h, d := device.Ptr{Arena: host, Len: window}, device.Ptr{Arena: disk, Off: off, Len: window}
		k, err := ctx.Copy("out", d, h)
		if err != nil {
			return err
		}
		out = append(out, k)
		if k, err = ctx.Copy("in", h, d); err != nil {
			return err
		}
		in = append(in, k)
	}
	rate := func(list []device.Kernel) float64 {
		start := time.Now()
		for _, k := range list {
			_ = s.Launch(k) // Sync has the error
		}
		if e := s.Sync(); e != nil {
			err = e
		}
		return size / time.Since(start).Seconds() / 1e9
	}
	rate(out)
	work := pool.New(cores)
	defer work.Close()
	fmt.Println("GB/s of the disk tier; computing: its kernels' share of the cores meanwhile")
	for range rounds {
		for _, more := range []int{0, 1, 2, 4} {
			before := runtime.GOMAXPROCS(cores + more)
			w, r := rate(out), rate(in)
			k := &spinner{}
			stop, ended := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(ended)
				for {
					select {
					case <-stop:
						return
					default:
						work.Run(2*cores, k)
					}
				}
			}()
			start := time.Now()
			bw, br := rate(out), rate(in)
			took := time.Since(start)
			close(stop)
			<-ended
			share := float64(k.done.Load()) * 2e-3 / took.Seconds() / float64(cores)
			fmt.Printf("GOMAXPROCS %2d (cores + %d)  idle: write %.2f read %.2f  computing: write %.2f read %.2f, %3.0f %% of the cores compute\n",
				cores+more, more, w, r, bw, br, 100*share)
			runtime.GOMAXPROCS(before)
		}
	}
	return err
}
