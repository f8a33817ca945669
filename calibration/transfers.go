package calibration

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/spillway-ml/spillway/comm/inproc"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/offload/store"
)

// transferTime is how long the transfer of each size is repeated.
const transferTime = 20 * time.Millisecond

// timedTransfers measures copies between device and host memory, collectives,
// and copies between host memory and disk.
func timedTransfers(ctx context.Context, threads int, o Options, s *cost.Samples) error {
	if err := timedCopies(threads, s); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	for _, ranks := range []int{2, 4} {
		if err := timedCollectives(threads, ranks, s); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if o.BesideDisk != nil {
		defer o.BesideDisk()()
	}
	err := timedDisk(o.Disk, s)
	if errors.Is(err, errors.ErrUnsupported) {
		return nil // no disk tier on this system
	}
	return err
}

// together runs each function in its own goroutine, times times in sequence, without
// synchronizing them. It returns the mean time of one call in s.
func together(runs []func() error, times int) (float64, error) {
	errs := make([]error, len(runs))
	var wg sync.WaitGroup
	start := time.Now()
	for i, run := range runs {
		wg.Go(func() {
			for range times {
				if errs[i] = run(); errs[i] != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	return time.Since(start).Seconds() / float64(times), errors.Join(errs...)
}

// steady returns the mean of together, repeated for about transferTime.
func steady(runs []func() error) (float64, error) {
	once, err := together(runs, 2) // touches the memory
	if err != nil {
		return 0, err
	}
	times := max(3, int(transferTime.Seconds()/once))
	return together(runs, times)
}

// arenaOf allocates an arena and writes to it, so that its pages exist.
func arenaOf(c *cpu.Context, space graph.Space, bytes int64) (device.Arena, error) {
	a, err := c.Alloc(space, bytes)
	if err != nil {
		return nil, err
	}
	v, err := cpu.Slice[float32](device.Ptr{Arena: a, Len: bytes})
	for i := range v {
		v[i] = float32(i)
	}
	return a, err
}

// round returns a function that calls the kernels in turn, so that the data of one has left the
// L1 cache when it runs again.
func round(kernels []device.Kernel) func() error {
	i := 0
	return func() error {
		k := kernels[i%len(kernels)]
		i++
		return k.(cpu.Kernel).Run()
	}
}

// copySpan is the size of the memory that copies cycle through, in bytes.
const copySpan = 16 << 20

func timedCopies(threads int, s *cost.Samples) (err error) {
	var contexts []*cpu.Context
	defer func() {
		for _, c := range contexts {
			err = errors.Join(err, c.Close())
		}
	}()
	var from, to []device.Arena
	for i := range threads {
		c := cpu.New(i, cpu.Options{})
		contexts = append(contexts, c)
		a, err := arenaOf(c, graph.Device, copySpan)
		if err != nil {
			return err
		}
		b, err := arenaOf(c, graph.Host, copySpan)
		if err != nil {
			return err
		}
		from, to = append(from, a), append(to, b)
	}
	for _, bytes := range []int64{16 << 10, 256 << 10, 2 << 20} {
		var runs []func() error
		for i, c := range contexts {
			var kernels []device.Kernel
			for at := int64(0); at+bytes <= copySpan; at += bytes {
				k, err := c.Copy("calibrate", device.Ptr{Arena: to[i], Off: at, Len: bytes}, device.Ptr{Arena: from[i], Off: at, Len: bytes})
				if err != nil {
					return err
				}
				kernels = append(kernels, k)
			}
			runs = append(runs, round(kernels))
		}
		one, err := steady(runs[:1])
		if err != nil {
			return err
		}
		all, err := steady(runs)
		if err != nil {
			return err
		}
		size := cost.Size{Bytes: float64(bytes)}
		for _, a := range []graph.Space{graph.Device, graph.Host} { // both spaces are in the same memory
			for _, b := range []graph.Space{graph.Device, graph.Host} {
				s.Alone = append(s.Alone, cost.Sample{Class: cost.CopyClass(a, b), Size: size, Seconds: one})
				s.Core = append(s.Core, cost.Sample{Class: cost.CopyClass(a, b), Size: size, Seconds: all})
			}
		}
	}
	return nil
}

// timedCollectives times collectives of a number of ranks. A rank's work is its share of the cores'
// time.
func timedCollectives(threads, ranks int, s *cost.Samples) (err error) {
	const span = 8 << 20
	world, err := inproc.New([]graph.Axis{{Name: "data", Size: ranks}}, inproc.Options{})
	if err != nil {
		return err
	}
	var contexts []*cpu.Context
	defer func() {
		for _, c := range contexts {
			err = errors.Join(err, c.Close())
		}
	}()
	var arenas []device.Arena
	for r := range ranks {
		c := cpu.New(r, cpu.Options{})
		contexts = append(contexts, c)
		a, err := arenaOf(c, graph.Device, span)
		if err != nil {
			return err
		}
		arenas = append(arenas, a)
	}
	for _, kind := range []graph.Kind{graph.AllGather, graph.ReduceScatter, graph.AllReduce} {
		for _, bytes := range []int64{8 << 10, 256 << 10, 2 << 20} {
			runs := make([]func() error, ranks)
			for r := range ranks {
				g, err := world.Group(r, 0)
				if err != nil {
					return err
				}
				var kernels []device.Kernel
				for at := int64(0); at+bytes <= span; at += bytes {
					whole := device.Ptr{Arena: arenas[r], Off: at, Len: bytes}
					part := device.Ptr{Arena: arenas[r], Off: at + bytes/int64(ranks)*int64(r), Len: bytes / int64(ranks)}
					var k device.Kernel
					switch kind {
					case graph.AllGather:
						k, err = g.AllGather("calibrate", part, whole, graph.F32)
					case graph.ReduceScatter:
						k, err = g.ReduceScatter("calibrate", whole, part, graph.F32, graph.SumTree, false)
					default:
						k, err = g.AllReduce("calibrate", whole, graph.F32, graph.SumTree)
					}
					if err != nil {
						return err
					}
					kernels = append(kernels, k)
				}
				runs[r] = round(kernels)
			}
			// All ranks must run the collective equally often, so steady chooses one number of
			// repeats for all.
			t, err := steady(runs)
			if err != nil {
				return err
			}
			sent := float64(bytes) / float64(ranks) * float64(ranks-1)
			if kind == graph.AllReduce {
				sent *= 2
			}
			work := t * float64(min(threads, ranks)) / float64(ranks)
			one := cost.Sample{Class: cost.Class(kind), Size: cost.Size{Bytes: sent}, Seconds: work}
			s.Alone, s.Core = append(s.Alone, one), append(s.Core, one)
		}
	}
	return nil
}

// diskRanks is the number of concurrent ranks that keep the disk busy.
const diskRanks = 3

func timedDisk(dir string, s *cost.Samples) (err error) {
	if dir == "" {
		if dir, err = os.MkdirTemp("", "spillway-calibrate-"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	}
	tuning, err := store.LoadTuning(dir)
	if err != nil {
		tuning = store.Tuning{} // a damaged tuning: training then uses the defaults too
	}
	folder, err := store.Open(filepath.Join(dir, "tier"), store.Options{Block: tuning.Block, Depth: tuning.Depth})
	if err != nil {
		return fmt.Errorf("disk tier: %w", err)
	}
	defer func() { err = errors.Join(err, folder.Close()) }()
	const span = 16 << 20
	c := cpu.New(0, cpu.Options{})
	defer func() { err = errors.Join(err, c.Close()) }()
	arena, err := arenaOf(c, graph.Host, diskRanks*span)
	if err != nil {
		return err
	}
	mem, err := cpu.Bytes(device.Ptr{Arena: arena, Len: diskRanks * span})
	if err != nil {
		return err
	}
	var files [diskRanks]device.Disk
	for r := range files {
		if files[r], err = folder.Create(r, span, 0); err != nil {
			return err
		}
		// Writes to newly allocated blocks are slower than all later ones.
		if err := files[r].Store(mem[r*span:][:span], 0).Run(); err != nil {
			return err
		}
	}
	for _, class := range []cost.Class{cost.CopyClass(graph.Disk, graph.Host), cost.CopyClass(graph.Host, graph.Disk)} {
		for _, bytes := range []int64{64 << 10, 512 << 10, 4 << 20} {
			runs := make([]func() error, diskRanks)
			for r := range runs {
				var list []device.Transfer
				// Offsets in a plan are multiples of 64 bytes.
				for at := int64(64); at+bytes <= span; at += bytes {
					if m := mem[int64(r)*span+at:][:bytes]; class == cost.CopyClass(graph.Disk, graph.Host) {
						list = append(list, files[r].Load(m, at))
					} else {
						list = append(list, files[r].Store(m, at))
					}
				}
				i := 0
				runs[r] = func() error { i++; return list[i%len(list)].Run() }
			}
			one, err := steady(runs[:1])
			if err != nil {
				return err
			}
			before, start := processTime(), time.Now()
			all, err := steady(runs)
			if err != nil {
				return err
			}
			busy := (processTime() - before) / time.Since(start).Seconds() // cores
			size := cost.Size{Bytes: float64(bytes)}
			s.Alone = append(s.Alone, cost.Sample{Class: class, Size: size, Seconds: one})
			s.Disk = append(s.Disk, cost.Sample{Class: class, Size: size, Seconds: all / diskRanks})
			s.Core = append(s.Core, cost.Sample{Class: class, Size: size, Seconds: busy * all / diskRanks})
		}
	}
	return nil
}
