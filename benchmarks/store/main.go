// Command store compares checkpoints with the machine's limits. It compares a save and a load of
// one rank's states with fio's sequential direct write and read of the same number of bytes in the
// same folder. It compares the stall of an asynchronous save with one copy of the states, and the
// demo that saves at every step with the demo that saves at its end. Both sides of a pair run one
// after the other and take turns at being first, since a shared machine's speed changes from one
// second to the next.
//
//	go run ./benchmarks/store -dir DIR [-bytes N] [-pairs N] [-spillway BINARY [-steps N]]
//
// It needs fio in the PATH.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"unsafe"

	"github.com/spillway-ml/spillway/benchmarks/bench"
	"github.com/spillway-ml/spillway/checkpoint"
)

type run struct {
	dir, binary  string
	bytes        int64
	pairs, steps int
	processor    [2][]float64 // processor time of the demo, in seconds: with saves at each step, and at its end
}

func main() {
	var r run
	flag.StringVar(&r.dir, "dir", "", "folder on the disk that is measured")
	flag.Int64Var(&r.bytes, "bytes", 768<<20, "bytes of a rank's states")
	flag.IntVar(&r.pairs, "pairs", 5, "pairs of each kind")
	flag.StringVar(&r.binary, "spillway", "", "binary of spillway, for the demo; empty: no demo")
	flag.IntVar(&r.steps, "steps", 60, "steps of the demo")
	flag.Parse()
	bench.Main("store", func() error {
		if r.dir == "" || r.pairs < 1 || r.bytes < 1<<20 {
			return errors.New("-dir is needed, at least one pair and 1 MiB")
		}
		if err := bench.FindFio(); err != nil {
			return err
		}
		return bench.Scratch(r.dir, "store", r.measure)
	})
}

func (b *run) measure(dir string) error {
	s := newStates(b.bytes)
	rates := func(what string, ours, theirs bench.Side) error {
		return b.compare(what, "GB/s", 1e-9, ours, theirs)
	}
	saved := ""
	save := func() (float64, error) {
		folder := filepath.Join(dir, "run")
		if err := os.RemoveAll(folder); err != nil {
			return 0, err
		}
		return s.rate(func() (err error) { saved, err = s.save(folder); return err })
	}
	if err := rates("save", save, func() (float64, error) { return beside(dir, true, s.bytes()) }); err != nil {
		return err
	}
	load := func() (float64, error) {
		r, err := s.rate(func() error { return s.load(saved) })
		return r, errors.Join(err, s.loaded())
	}
	if err := rates("load", load, func() (float64, error) { return beside(dir, false, s.bytes()) }); err != nil {
		return err
	}
	var image checkpoint.Image
	defer image.Close()
	stage := func() (float64, error) { return bench.Seconds(func() error { return image.Stage(s.part()) }) }
	plain := make([]float32, s.elements())
	one := func() (float64, error) { return bench.Seconds(func() error { s.copyTo(plain); return nil }) }
	for _, f := range []bench.Side{stage, one} { // touches the memory of both
		if _, err := f(); err != nil {
			return err
		}
	}
	if err := b.compare("stall", "ms", 1e3, stage, one); err != nil {
		return err
	}
	if b.binary == "" {
		return nil
	}
	err := b.compare("demo", "s", 1, func() (float64, error) { return b.demo(dir, "--save-every", "1") }, func() (float64, error) { return b.demo(dir) })
	if err != nil {
		return err
	}
	tell("demo's processor time", bench.Ratios(b.processor[0], b.processor[1]))
	return nil
}

// compare prints pairs and the median of their ratios.
func (b *run) compare(what, unit string, scale float64, ours, theirs bench.Side) error {
	other := map[string]string{"save": "fio", "load": "fio", "stall": "one copy", "demo": "saves at its end"}[what]
	pairs, err := bench.Pairs(b.pairs, ours, theirs, func(_ int, a, b float64) {
		fmt.Printf("%-5s  spillway %.2f %s  %s %.2f  ratio %.3f\n", what, a*scale, unit, other, b*scale, a/b)
	})
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	tell(what, bench.Ratios(bench.Column(pairs, 0), bench.Column(pairs, 1)))
	return nil
}

func tell(what string, ratios []float64) {
	fmt.Printf("%-5s  median ratio %s of %d pairs\n", what, bench.Spread(ratios, "%.3f"), len(ratios))
}

// states are the states of a rank: parameters and two moments of tensors of 8 MiB.
type states struct {
	names   []string
	values  map[string][][]float32 // by state and tensor
	tensors []checkpoint.Tensor
	extents []checkpoint.Extent
	into    map[string][][]float32 // filled by a load
}

const tensorElems = 2 << 20

var kinds = []string{"param", "m", "v"}

func newStates(bytes int64) *states {
	s := &states{values: map[string][][]float32{}, into: map[string][][]float32{}}
	n := max(1, int(bytes/4/int64(len(kinds))/tensorElems))
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range n {
		name := fmt.Sprintf("t%04d", i)
		s.names = append(s.names, name)
		s.tensors = append(s.tensors, checkpoint.Tensor{Name: name, Shape: []int64{tensorElems}, States: kinds})
		for _, k := range kinds {
			v := make([]float32, tensorElems)
			for j := range v {
				v[j] = rng.Float32()
			}
			s.values[k] = append(s.values[k], v)
			into := make([]float32, tensorElems)
			for j := range into { // in a run the memory is touched before anything is loaded into it
				into[j] = 1
			}
			s.into[k] = append(s.into[k], into)
			for at := int64(0); at < tensorElems; at += checkpoint.ExtentBytes / 4 {
				s.extents = append(s.extents, checkpoint.Extent{State: k, Tensor: name, Start: at, N: checkpoint.ExtentBytes / 4, DType: "F32"})
			}
		}
	}
	return s
}

func (s *states) elements() int64 { return int64(len(s.names) * len(kinds) * tensorElems) }

func (s *states) bytes() int64 { return 4 * s.elements() }

// rate returns the bytes per second of f.
func (s *states) rate(f func() error) (float64, error) {
	t, err := bench.Seconds(f)
	return float64(s.bytes()) / t, err
}

func (s *states) at(e checkpoint.Extent) []float32 {
	i, _ := slices.BinarySearch(s.names, e.Tensor)
	return s.values[e.State][i][e.Start:][:e.N]
}

func (s *states) part() *checkpoint.Part {
	return &checkpoint.Part{Of: 1, Extents: s.extents, Read: func(i int, off int64, dst []byte) error {
		v := s.at(s.extents[i])
		copy(dst, unsafe.Slice((*byte)(unsafe.Pointer(&v[0])), 4*len(v))[off:])
		return nil
	}}
}

func (s *states) copyTo(dst []float32) {
	for _, k := range kinds {
		for _, v := range s.values[k] {
			dst = dst[copy(dst, v):]
		}
	}
}

func (s *states) save(dir string) (folder string, err error) {
	store, err := checkpoint.Open(dir, checkpoint.Options{})
	if err != nil {
		return "", err
	}
	folder, err = store.Save(context.Background(), checkpoint.Manifest{Step: 1, Ranks: 1, Run: json.RawMessage("{}"), Tensors: s.tensors}, []*checkpoint.Part{s.part()}, nil)
	return folder, errors.Join(err, store.Close())
}

func (s *states) load(folder string) error {
	var wants []checkpoint.Want
	for _, t := range s.tensors {
		for _, k := range kinds {
			wants = append(wants, checkpoint.Want{State: k, Tensor: t.Name, N: tensorElems})
		}
	}
	c, err := checkpoint.OpenCheckpoint(folder)
	if err != nil {
		return err
	}
	err = c.Load(context.Background(), wants, checkpoint.Loading{Sink: func(state, tensor string, start int64, v []float32) error {
		i, _ := slices.BinarySearch(s.names, tensor)
		copy(s.into[state][i][start:], v)
		return nil
	}})
	return errors.Join(err, c.Close())
}

// loaded compares the loaded states with the saved ones.
func (s *states) loaded() error {
	for k, list := range s.into {
		for i, v := range list {
			if !slices.Equal(v, s.values[k][i]) {
				return fmt.Errorf("%s of %s came back otherwise", k, s.names[i])
			}
			clear(v) // so that the next load must fill it
		}
	}
	return nil
}

// beside returns the bytes per second of fio's sequential direct write of the same number of bytes,
// to a new file that is synced at its end, or of its read.
func beside(dir string, write bool, bytes int64) (float64, error) {
	j := bench.Fio{File: filepath.Join(dir, "fio.bin"), Write: write, Bytes: bytes, Block: 1 << 20, Depth: 4, Engine: "libaio", Sync: true}
	if write {
		if err := os.Remove(j.File); err != nil && !errors.Is(err, os.ErrNotExist) {
			return 0, err
		}
	}
	return j.Run()
}

// demo returns the seconds of a complete run of the demo.
func (b *run) demo(dir string, more ...string) (float64, error) {
	folder := filepath.Join(dir, "demo")
	if err := os.RemoveAll(folder); err != nil {
		return 0, err
	}
	wall, processor, err := bench.Run("", append([]string{b.binary, "train", "--steps", fmt.Sprint(b.steps), "--checkpoint", folder}, more...)...)
	side := min(len(more), 1) ^ 1
	b.processor[side] = append(b.processor[side], processor)
	return wall, err
}
