package inproc_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/inproc"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
)

// benchmark runs one collective on every rank, each with its own goroutine.
func benchmark(b *testing.B, w int, arena int64, bind func(g comm.Group, a device.Arena, r int) (device.Kernel, error)) {
	world, err := inproc.New(ranks(w), inproc.Options{Timeout: time.Minute})
	if err != nil {
		b.Fatal(err)
	}
	var streams []device.Stream
	var kernels []device.Kernel
	for r := range w {
		c := cpu.New(r, cpu.Options{})
		b.Cleanup(func() { _ = c.Close() })
		a, err := c.Alloc(graph.Device, arena)
		if err != nil {
			b.Fatal(err)
		}
		v, _ := cpu.Slice[float32](device.Ptr{Arena: a, Len: arena})
		for i := range v { // not the kernel's zero page
			v[i] = float32(i)
		}
		s, err := c.NewStream(graph.Comm)
		if err != nil {
			b.Fatal(err)
		}
		g, err := world.Group(r, -1)
		if err != nil {
			b.Fatal(err)
		}
		k, err := bind(g, a, r)
		if err != nil {
			b.Fatal(err)
		}
		streams, kernels = append(streams, s), append(kernels, k)
	}
	b.ReportAllocs()
	for b.Loop() {
		for r, s := range streams {
			_ = s.Launch(kernels[r])
		}
		for _, s := range streams {
			if err := s.Sync(); err != nil {
				b.Fatal(err)
			}
		}
	}
}

func BenchmarkCollectives(b *testing.B) {
	for _, w := range []int{2, 4} {
		b.Run(fmt.Sprintf("barrier/%d ranks", w), func(b *testing.B) {
			benchmark(b, w, 64, func(g comm.Group, a device.Arena, r int) (device.Kernel, error) { return g.Barrier("b") })
		})
		const bytes = 64 << 20
		full := func(a device.Arena) device.Ptr { return device.Ptr{Arena: a, Len: bytes} }
		part := func(a device.Arena, r int) device.Ptr {
			n := int64(bytes / w)
			return device.Ptr{Arena: a, Off: int64(r) * n, Len: n}
		}
		b.Run(fmt.Sprintf("all_reduce 64 MiB/%d ranks", w), func(b *testing.B) {
			b.SetBytes(bytes)
			benchmark(b, w, bytes, func(g comm.Group, a device.Arena, r int) (device.Kernel, error) {
				return g.AllReduce("ar", full(a), graph.F32, graph.SumTree)
			})
		})
		b.Run(fmt.Sprintf("reduce_scatter 64 MiB/%d ranks", w), func(b *testing.B) {
			b.SetBytes(bytes)
			benchmark(b, w, bytes, func(g comm.Group, a device.Arena, r int) (device.Kernel, error) {
				return g.ReduceScatter("rs", full(a), part(a, r), graph.F32, graph.SumTree, false)
			})
		})
		b.Run(fmt.Sprintf("all_gather 64 MiB/%d ranks", w), func(b *testing.B) {
			b.SetBytes(bytes)
			benchmark(b, w, bytes, func(g comm.Group, a device.Arena, r int) (device.Kernel, error) {
				return g.AllGather("ag", part(a, r), full(a), graph.F32)
			})
		})
	}
}
