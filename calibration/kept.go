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

// calibrationFormat is the version of the measurements; it changes whenever a calibration
// measures something else.
const calibrationFormat = 4

// calibrationAge is the age after which a stored calibration is no longer used.
const calibrationAge = 90 * 24 * time.Hour

// keptMachine is one machine's stored measurements, and the properties of the machine for which
// they are valid.
type keptMachine struct {
	Format      int               `json:"format"`
	CPU         string            `json:"cpu"` // model; empty: unknown
	SIMD        string            `json:"simd"`
	Measured    time.Time         `json:"measured"`
	Calibration *cost.Calibration `json:"calibration"` // null: none
	// MemoryBandwidth is that of copies on all cores, in bytes/s read and written; 0: not
	// measured.
	MemoryBandwidth float64 `json:"memory_bytes_per_second"`
	// Links are the measured times of collectives, by transport and ranks.
	Links []keptLinks `json:"links,omitempty"`
	// Peaks are the measured rates of products, by number of threads.
	Peaks map[int]Peak `json:"peaks,omitempty"`
}

// calibrationFile is the contents of calibration.json: the measurements, by machine.
type calibrationFile struct {
	Machines map[string]keptMachine `json:"machines"`
}

// Path returns the file of stored measurements, in the user's configuration folder.
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

// machineName returns the key under which this machine's measurements are stored.
func machineName() string {
	name, err := os.Hostname()
	if err != nil || name == "" {
		return "this machine"
	}
	return name
}

// CPUModel returns the processor's name; empty if it is unknown.
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

// Keep stores a calibration of this machine in place of an older one and returns the path of
// the file.
func Keep(c *cost.Calibration) (path string, err error) {
	return keep(func(k *keptMachine) {
		k.Format, k.CPU, k.SIMD = calibrationFormat, CPUModel(), level.Current().String()
		k.Measured, k.Calibration = time.Now().UTC().Truncate(time.Second), c
	})
}

// KeepMemoryBandwidth stores this machine's memory bandwidth, in bytes/s read and written, and
// returns the path of the file.
func KeepMemoryBandwidth(v float64) (path string, err error) {
	return keep(func(k *keptMachine) { k.MemoryBandwidth = v })
}

// MemoryBandwidth returns the stored bandwidth in bytes/s; 0 if none is stored.
func MemoryBandwidth() float64 { return kept().MemoryBandwidth }

// kept returns this machine's stored measurements; none if the file cannot be read.
func kept() keptMachine {
	path, err := Path()
	if err != nil {
		return keptMachine{}
	}
	f, err := readCalibrations(path)
	if err != nil {
		return keptMachine{}
	}
	return f.Machines[machineName()]
}

// keep changes this machine's entry in the file. Other machines' entries stay, since a home
// folder may be shared.
func keep(change func(*keptMachine)) (path string, err error) {
	fail := func(err error) (string, error) { return path, fmt.Errorf("keep the measurement: %w", err) }
	if path, err = Path(); err != nil {
		return fail(err)
	}
	f, err := readCalibrations(path)
	if err != nil || f.Machines == nil { // the file is missing, or damaged and replaced
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

// Kept returns this machine's stored calibration for a number of threads, with a note for the
// user. If none is valid, c is nil and note says why the stored one is not; "" if none is
// stored.
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

// Hardware describes this process's CPU device with a number of threads, as calibrated or with
// typical rates. The note is that of Kept.
func Hardware(threads int) (hw planner.Hardware, calibrated bool, note string) {
	c, note := Kept(threads)
	if c == nil {
		return planner.CPUHardware(threads), false, note
	}
	return planner.Hardware{Machine: c.Machine}, true, note
}
