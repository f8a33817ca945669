// Command disk compares the disk tier with fio: the same folder, block size, queue depth and number
// of bytes, with direct I/O on both sides. The sides run in turn, since the speed of a shared
// machine's disk changes from one second to the next. The tier's side includes the costs of a
// training run: the checksum of every 4096 bytes, and with -shift the copy for unaligned memory.
//
//	go run ./benchmarks/disk -dir DIR [-block BYTES] [-depth N] [-bytes N] [-pairs N] [-engine libaio] [-shift BYTES] [-json FILE]
//
// It needs fio in the PATH.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/spillway-ml/spillway/benchmarks/bench"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/offload/store"
)

// Pair is one measurement of both sides, in bytes per second.
type Pair struct {
	Spillway float64 `json:"spillway"`
	Fio      float64 `json:"fio"`
}

// Result is the output of -json.
type Result struct {
	Command  []string `json:"command"`
	Time     string   `json:"time"`
	CPUs     int      `json:"cpus"`
	Disk     string   `json:"filesystem"`
	Block    int      `json:"block_bytes"`
	Depth    int      `json:"queue_depth"`
	Bytes    int64    `json:"bytes"`
	Shift    int      `json:"memory_shift_bytes"`
	Engine   string   `json:"fio_engine"`
	Write    []Pair   `json:"write"`
	Read     []Pair   `json:"read"`
	WriteRel float64  `json:"write_median_ratio"`
	ReadRel  float64  `json:"read_median_ratio"`
}

func main() { bench.Main("disk", run) }

// sides are the settings and the memory of a measurement.
type sides struct {
	dir, engine string
	block       int
	depth       int
	bytes       int64
	file        string // fio's
	window      int64  // bytes that pass through mem at a time
	mem         []byte
}

func run() (err error) {
	var b sides
	flag.StringVar(&b.dir, "dir", "", "folder on the disk to measure")
	flag.IntVar(&b.block, "block", store.DefaultBlock, "bytes of a request")
	flag.IntVar(&b.depth, "depth", store.DefaultDepth, "requests in flight")
	flag.Int64Var(&b.bytes, "bytes", 1<<30, "bytes of the file, all written and read in a turn")
	pairs := flag.Int("pairs", 7, "turns")
	flag.StringVar(&b.engine, "engine", "libaio", "fio's --ioengine: libaio or io_uring")
	shift := flag.Int("shift", 0, "memory starts that many bytes after a page")
	jsonPath := flag.String("json", "", "write the pairs to this file")
	flag.Parse()
	if b.dir == "" {
		return errors.New("-dir is missing")
	}
	options := store.Options{Block: b.block, Depth: b.depth}
	options.Warn = func(s string) { fmt.Fprintln(os.Stderr, "warning:", s) }
	folder, err := store.Open(b.dir, options)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, folder.Close()) }()
	disk, err := folder.Create(0, b.bytes, 0)
	if err != nil {
		return err
	}
	b.window = min(b.bytes, 64<<20)
	// Allocate host memory as in a run.
	ctx := cpu.New(0, cpu.Options{Pin: true})
	defer func() { err = errors.Join(err, ctx.Close()) }()
	arena, err := ctx.Alloc(graph.Host, b.window+int64(*shift))
	if err != nil {
		return err
	}
	if b.mem, err = ctx.HostBytes(device.Ptr{Arena: arena, Off: int64(*shift), Len: b.window}); err != nil {
		return err
	}
	for i := range b.mem {
		b.mem[i] = byte(i*7 + i>>11)
	}
	b.file = filepath.Join(b.dir, "fio.bin")
	defer func() { err = errors.Join(err, os.Remove(b.file)) }()
	command := slices.Clone(os.Args[1:])
	for i, arg := range command {
		if arg == b.dir || arg == *jsonPath && arg != "" {
			command[i] = "PATH" // leave out paths of this machine
		}
	}
	r := Result{Command: command, Time: time.Now().UTC().Format(time.RFC3339), CPUs: runtime.NumCPU(), Disk: store.FilesystemOf(b.dir), Block: b.block, Depth: b.depth,
		Bytes: b.bytes, Shift: *shift, Engine: b.engine}
	if err := b.measure(&r, *pairs, disk.Store, disk.Load); err != nil {
		return err
	}
	fmt.Printf("median ratio: write %.3f, read %.3f (block %d, depth %d, %s)\n", r.WriteRel, r.ReadRel, b.block, b.depth, r.Disk)
	return bench.WriteJSON(*jsonPath, r)
}

// binder binds a transfer of memory to or from an offset of the file.
type binder func(mem []byte, off int64) device.Transfer

// measure fills in the pairs and their medians.
func (b *sides) measure(r *Result, pairs int, store, load binder) error {
	for _, d := range []struct {
		rw   string
		bind binder
		list *[]Pair
		rel  *float64
	}{{"write", store, &r.Write, &r.WriteRel}, {"read", load, &r.Read, &r.ReadRel}} {
		ours := func() (float64, error) { return b.ours(d.bind) }
		theirs := func() (float64, error) { return b.fio(d.rw) }
		if d.rw == "write" { // the first write to preallocated space is slower
			for _, once := range []bench.Side{ours, theirs} {
				if _, err := once(); err != nil {
					return err
				}
			}
		}
		list, err := bench.Pairs(pairs, ours, theirs, func(_ int, a, f float64) {
			fmt.Printf("%-5s  spillway %.2f GB/s  fio %.2f GB/s  ratio %.3f\n", d.rw, a/1e9, f/1e9, a/f)
			*d.list = append(*d.list, Pair{a, f})
		})
		if err != nil {
			return err
		}
		*d.rel = bench.Median(bench.Ratios(bench.Column(list, 0), bench.Column(list, 1)))
	}
	return nil
}

// ours transfers the complete file once and returns bytes per second.
func (b *sides) ours(bind binder) (float64, error) {
	var list []device.Transfer
	for off := int64(0); off < b.bytes; off += b.window {
		list = append(list, bind(b.mem[:min(b.window, b.bytes-off)], off))
	}
	start := time.Now()
	for _, t := range list {
		if err := t.Run(); err != nil {
			return 0, err
		}
	}
	return float64(b.bytes) / time.Since(start).Seconds(), nil
}

// fio does the same with fio and returns the reported rate.
func (b *sides) fio(rw string) (float64, error) {
	return bench.Fio{File: b.file, Write: rw == "write", Bytes: b.bytes, Block: b.block, Depth: b.depth, Engine: b.engine}.Run()
}
