//go:build linux

package main

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

//go:embed loop/allreduce.c
var loopInC string

// The sizes that the bars are for.
const (
	large = 64 << 20
	small = 64 << 10
)

// row is what is read of a row of bench comm.
type row struct {
	Op      string  `json:"op"`
	Bytes   int64   `json:"bytes"`
	Seconds float64 `json:"seconds"`
	Bound   float64 `json:"bound_seconds"`
	Peer    float64 `json:"peer_seconds"`
}

// allReduces runs bench comm under a launcher and returns its all-reduces by size.
func allReduces(file string, command ...string) (map[int64]row, error) {
	command = append(command, "bench", "comm", "--operation", "all_reduce", "--max-bytes", "64MiB", "--json", file)
	cmd := exec.Command(command[0], command[1:]...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%s: %w: %s", strings.Join(command, " "), err, out)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var rows []row
	if err := json.Unmarshal(text, &rows); err != nil {
		return nil, fmt.Errorf("%s: %w", strings.Join(command, " "), err)
	}
	by := map[int64]row{}
	for _, r := range rows {
		by[r.Bytes] = r
	}
	return by, nil
}

// library is an MPI library with its launcher and compiler.
type library struct {
	name, compiler string
	launcher       []string
	loop           string // the compiled C loop; "": there is no compiler
	note           string // why it is not measured, or its C loop is not
}

func libraries(dir string) (list []library) {
	openmpi := []string{"mpirun.openmpi", "--oversubscribe"}
	if os.Geteuid() == 0 {
		openmpi = append(openmpi, "--allow-run-as-root")
	}
	for _, l := range []library{{name: "Open MPI", compiler: "mpicc.openmpi", launcher: openmpi}, {name: "MPICH", compiler: "mpicc.mpich", launcher: []string{"mpirun.mpich"}}} {
		if _, err := exec.LookPath(l.launcher[0]); err != nil {
			l.note, l.launcher = err.Error(), nil
		} else {
			l.launcher = append(l.launcher, "-np", "2")
			l.loop, l.note = compile(l.compiler, dir)
		}
		list = append(list, l)
	}
	return list
}

// compile makes the C loop.
func compile(compiler, dir string) (program, note string) {
	source := filepath.Join(dir, "allreduce.c")
	if err := os.WriteFile(source, []byte(loopInC), 0o644); err != nil {
		return "", err.Error()
	}
	program = filepath.Join(dir, "allreduce-"+compiler)
	if out, err := exec.Command(compiler, "-O2", "-o", program, source).CombinedOutput(); err != nil {
		return "", fmt.Sprintf("no C loop: %s: %v %s", compiler, err, out)
	}
	return program, ""
}

// inLoop runs the C loop and returns the median time of an all-reduce, s.
func (l *library) inLoop(bytes int64) (float64, error) {
	times := min(max((16<<20)/bytes, 1), 100) // as bench comm
	command := append(slices.Clone(l.launcher), l.loop, strconv.FormatInt(bytes, 10), strconv.FormatInt(times, 10))
	out, err := exec.Command(command[0], command[1:]...).Output()
	if err != nil {
		return 0, fmt.Errorf("%s: %w", strings.Join(command, " "), err)
	}
	var v []float64
	for _, f := range strings.Fields(string(out)) {
		s, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return 0, fmt.Errorf("%s: %q: %w", strings.Join(command, " "), f, err)
		}
		v = append(v, s)
	}
	if len(v) == 0 {
		return 0, fmt.Errorf("%s: printed nothing", strings.Join(command, " "))
	}
	slices.Sort(v)
	return v[len(v)/2], nil
}

// series is what a side took, by size, a value a round.
type series map[int64][]float64

func (s series) add(by map[int64]row, of func(row) float64) {
	for _, size := range []int64{small, large} {
		if r, ok := by[size]; ok && of(r) > 0 {
			s[size] = append(s[size], of(r))
		}
	}
}

func measureComm(binary, dir string, rounds int) error {
	file := filepath.Join(dir, "rows.json")
	shm, bound := series{}, series{}
	type side struct {
		library
		ours, own, inC series
	}
	var sides []side
	for _, l := range libraries(dir) {
		sides = append(sides, side{l, series{}, series{}, series{}})
	}
	for range rounds {
		by, err := allReduces(file, binary, "launch", "-n", "2", "--")
		if err != nil {
			return err
		}
		shm.add(by, func(r row) float64 { return r.Seconds })
		bound.add(by, func(r row) float64 { return r.Bound })
		for _, s := range sides {
			if s.launcher == nil {
				continue
			}
			by, err := allReduces(file, append(slices.Clone(s.launcher), binary)...)
			if err != nil {
				return err
			}
			s.ours.add(by, func(r row) float64 { return r.Seconds })
			s.own.add(by, func(r row) float64 { return r.Peer })
			for _, size := range []int64{small, large} {
				if s.loop == "" {
					continue
				}
				t, err := s.inLoop(size)
				if err != nil {
					return err
				}
				s.inC[size] = append(s.inC[size], t)
			}
		}
	}
	micros := func(v []float64) string { return spread(scaled(v, 1e6), "%.0f µs") }
	fmt.Printf("All-reduce of float32 between 2 ranks; median (least to most) of %d rounds.\n\n| | 64 KiB | 64 MiB |\n| --- | --- | --- |\n", rounds)
	fmt.Printf("| shared memory | %s | %s |\n| bound by memory: bytes that move ÷ what 2 threads copy | %s | %s |\n", micros(shm[small]), micros(shm[large]), micros(bound[small]), micros(bound[large]))
	for _, s := range sides {
		if s.note != "" {
			fmt.Printf("| %s: %s | | |\n", s.name, strings.TrimSpace(s.note))
		}
		if s.launcher == nil {
			continue
		}
		fmt.Printf("| %s, Spillway's over it | %s | %s |\n| %s, its own, in the same run | %s | %s |\n| %s, its own in a C loop | %s | %s |\n",
			s.name, micros(s.ours[small]), micros(s.ours[large]), s.name, micros(s.own[small]), micros(s.own[large]), s.name, micros(s.inC[small]), micros(s.inC[large]))
	}
	fmt.Printf("\n| bar | measured, pair by pair | met |\n| --- | --- | --- |\n")
	bar := func(what string, v []float64, limit float64, least bool, format string) {
		fmt.Printf("| %s | %s | %s |\n", what, spread(v, format), met(v, limit, least))
	}
	for _, s := range sides {
		if s.name == "Open MPI" {
			bar("64 MiB: Open MPI's own ÷ shared memory ≥ 6", ratios(s.own[large], shm[large]), 6, true, "%.2f")
		}
	}
	bar("64 MiB: shared memory ÷ bound ≤ 1.4", ratios(shm[large], bound[large]), 1.4, false, "%.2f")
	bar("64 KiB: shared memory ≤ 100 µs", scaled(shm[small], 1e6), 100, false, "%.0f µs")
	for _, s := range sides {
		if s.loop != "" {
			bar("64 MiB: Spillway over "+s.name+" ÷ the C loop ≤ 1.1", ratios(s.ours[large], s.inC[large]), 1.1, false, "%.2f")
			bar("64 KiB: Spillway over "+s.name+" ÷ the C loop ≤ 1.1", ratios(s.ours[small], s.inC[small]), 1.1, false, "%.2f")
		}
	}
	return nil
}

func scaled(v []float64, by float64) (r []float64) {
	for _, x := range v {
		r = append(r, x*by)
	}
	return r
}
