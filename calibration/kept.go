package calibration

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/internal/aside"
	"github.com/spillway-ml/spillway/internal/regular"
	"github.com/spillway-ml/spillway/internal/userdir"
	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/planner"
)

// calibrationFormat changes whenever what a calibration measures does.
const calibrationFormat = 1

// calibrationAge is how old a kept calibration may be.
const calibrationAge = 90 * 24 * time.Hour

// keptMachine is what was measured of a machine, and what a calibration holds
// for.
type keptMachine struct {
	Format      int               `json:"format"`
	CPU         string            `json:"cpu"` // model; empty: the system does not tell
	SIMD        string            `json:"simd"`
	Measured    time.Time         `json:"measured"`
	Calibration *cost.Calibration `json:"calibration"` // null: none
	// MemoryBandwidth is that of copies by all cores, read and written; 0: not
	// measured.
	MemoryBandwidth float64 `json:"memory_bytes_per_second"`
	// Links is what collectives took, by transport and ranks.
	Links []keptLinks `json:"links,omitempty"`
	// Peaks are the rates of products, by threads.
	Peaks map[int]Peak `json:"peaks,omitempty"`
}

// calibrationFile is calibration.json: what was measured, by machine.
type calibrationFile struct {
	Machines map[string]keptMachine `json:"machines"`
}

// Path is the file with what was measured of machines, in the user's
// configuration folder.
func Path() (string, error) {
	dir, err := userdir.Config()
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, "spillway", "calibration.json"), nil
}

func readCalibrations(path string) (f calibrationFile, err error) {
	text, err := regular.ReadFile(path, 16<<20)
	if err == nil {
		err = json.Unmarshal(text, &f)
	}
	return f, err
}

// machineName is what a calibration is kept under.
func machineName() string {
	name, err := os.Hostname()
	if err != nil || name == "" {
		return "this machine"
	}
	return name
}

// CPUModel is the processor's name, empty where the system does not tell.
func CPUModel() string {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// Keep stores a calibration of this machine in place of an older one
// and returns the file that has it.
func Keep(c *cost.Calibration) (path string, err error) {
	return keep(func(k *keptMachine) {
		k.Format, k.CPU, k.SIMD = calibrationFormat, CPUModel(), level.Current().String()
		k.Measured, k.Calibration = time.Now().UTC().Truncate(time.Second), c
	})
}

// KeepMemoryBandwidth stores the bandwidth of this machine's memory, in bytes/s
// read and written, and returns the file that has it.
func KeepMemoryBandwidth(v float64) (path string, err error) {
	return keep(func(k *keptMachine) { k.MemoryBandwidth = v })
}

// MemoryBandwidth returns what was kept, 0 for nothing.
func MemoryBandwidth() float64 {
	path, err := Path()
	if err != nil {
		return 0
	}
	f, err := readCalibrations(path)
	if err != nil {
		return 0
	}
	return f.Machines[machineName()].MemoryBandwidth
}

// keep changes this machine's entry. Those of others stay: a home folder may be
// shared.
func keep(change func(*keptMachine)) (path string, err error) {
	fail := func(err error) (string, error) { return path, fmt.Errorf("keep the measurement: %w", err) }
	if path, err = Path(); err != nil {
		return fail(err)
	}
	f, err := readCalibrations(path)
	if err != nil || f.Machines == nil { // absent, or damaged and made anew
		f.Machines = map[string]keptMachine{}
	}
	k := f.Machines[machineName()]
	change(&k)
	f.Machines[machineName()] = k
	text, err := json.MarshalIndent(f, "", "  ")
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o777)
	}
	if err != nil {
		return fail(err)
	}
	if err := aside.WriteBytes(path, append(text, '\n'), 0o600); err != nil {
		return fail(err)
	}
	return path, nil
}

// Kept returns what was kept of this machine with so many threads, and a few words for
// a person on it; nil where there is nothing that holds, and then why what is there does
// not: "" where nothing is.
func Kept(threads int) (c *cost.Calibration, note string) {
	path, err := Path()
	if err != nil {
		return nil, ""
	}
	f, err := readCalibrations(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, ""
	case err != nil:
		return nil, fmt.Sprintf("the calibrations in %s can't be used: %v", path, err)
	}
	name := machineName()
	k, ok := f.Machines[name]
	stale := func(why string, args ...any) (*cost.Calibration, string) {
		return nil, fmt.Sprintf("the calibration of %s in %s is stale: %s", name, path, fmt.Sprintf(why, args...))
	}
	switch {
	case !ok || k.Calibration == nil:
		return nil, ""
	case k.Format != calibrationFormat:
		return stale("it is of another version of spillway")
	case k.CPU != CPUModel():
		return stale("the processor was %q and is %q", k.CPU, CPUModel())
	case k.SIMD != level.Current().String():
		return stale("the SIMD level was %s and is %s", k.SIMD, level.Current())
	case k.Calibration.Threads != threads:
		return stale("it is for %d threads, not for %d", k.Calibration.Threads, threads)
	case time.Since(k.Measured) > calibrationAge:
		return stale("it is of %s", k.Measured.Format(time.DateOnly))
	}
	return k.Calibration, fmt.Sprintf("as calibrated on %s, %s", name, k.Measured.Format(time.DateOnly))
}

// Hardware is the CPU device of this process with so many threads: as it was
// calibrated, or with typical rates. The note is Kept's.
func Hardware(threads int) (hw planner.Hardware, calibrated bool, note string) {
	c, note := Kept(threads)
	if c == nil {
		return planner.CPUHardware(threads), false, note
	}
	return planner.Hardware{Machine: c.Machine}, true, note
}
