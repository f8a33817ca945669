// Package bench is shared by the benchmarks: pairs measured in turn, medians and spreads, and files
// with results.
package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"
)

// Main runs a benchmark. Its error ends the program with status 1.
func Main(name string, run func() error) {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, name+":", err)
		os.Exit(1)
	}
}

// Side measures one side of a pair once.
type Side func() (float64, error)

// Pairs measures both sides n times. They take turns at being first, because a shared machine's
// speed changes from one second to the next. each is called with every pair.
func Pairs(n int, a, b Side, each func(k int, a, b float64)) (list [][2]float64, err error) {
	for k := range n {
		var pair [2]float64
		for turn := range 2 {
			side := (turn + k) % 2
			if pair[side], err = []Side{a, b}[side](); err != nil {
				return nil, err
			}
		}
		list = append(list, pair)
		if each != nil {
			each(k+1, pair[0], pair[1])
		}
	}
	return list, nil
}

// Column returns side 0 or 1 of pairs.
func Column(pairs [][2]float64, side int) (list []float64) {
	for _, p := range pairs {
		list = append(list, p[side])
	}
	return list
}

// Ratios divides a by b, value by value, up to the length of the shorter one.
func Ratios(a, b []float64) (list []float64) {
	for i := range min(len(a), len(b)) {
		list = append(list, a[i]/b[i])
	}
	return list
}

// Median returns the median of values.
func Median(values []float64) float64 {
	s := slices.Sorted(slices.Values(values))
	n := len(s)
	return (s[(n-1)/2] + s[n/2]) / 2
}

// Spread formats the median of values with the smallest and the largest.
func Spread(values []float64, format string) string {
	if len(values) == 0 {
		return "–"
	}
	return fmt.Sprintf(format+" ("+format+" to "+format+")", Median(values), slices.Min(values), slices.Max(values))
}

// Seconds returns the time that f takes.
func Seconds(f func() error) (float64, error) {
	began := time.Now()
	err := f()
	return time.Since(began).Seconds(), err
}

// Spillway returns the absolute path of the program to measure: the given one, or if that is empty
// one that is built from this source into dir.
func Spillway(given, dir string) (string, error) {
	if given != "" {
		return filepath.Abs(given)
	}
	path := filepath.Join(dir, "spillway")
	if out, err := exec.Command("go", "build", "-o", path, "github.com/spillway-ml/spillway/cmd/spillway").CombinedOutput(); err != nil {
		return "", fmt.Errorf("build spillway: %w: %s", err, out)
	}
	return path, nil
}

// Run runs a command in a folder and returns the seconds that it took, and the processor
// time that it used.
func Run(dir string, command ...string) (wall, processor float64, err error) {
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Dir = dir
	began := time.Now()
	out, err := cmd.CombinedOutput()
	if err != nil {
		return 0, 0, fmt.Errorf("%q: %w: %.500s", command, err, out)
	}
	return time.Since(began).Seconds(), (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds(), nil
}

// WriteJSON writes v to a file, or does nothing if path is empty.
func WriteJSON(path string, v any) error {
	if path == "" {
		return nil
	}
	text, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}

// Scratch calls f with a temporary folder below dir, which it then removes.
func Scratch(dir, name string, f func(dir string) error) error {
	dir, err := os.MkdirTemp(dir, name+"-")
	if err != nil {
		return err
	}
	return errors.Join(f(dir), os.RemoveAll(dir))
}
