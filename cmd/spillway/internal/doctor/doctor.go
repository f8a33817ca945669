// Package doctor implements the command doctor.
package doctor

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway/calibration"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/comm/nccl/libnccl"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/device/cuda/dynlib"
	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/internal/dl"
	"github.com/spillway-ml/spillway/internal/nvml"
	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
	"github.com/spillway-ml/spillway/kernels/cuda/images"
	"github.com/spillway-ml/spillway/kernels/cuda/nvrtc"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
)

// Diagnosis is the result of doctor; --json writes it.
type Diagnosis struct {
	CPU struct {
		Model   string  `json:"model"` // empty: not known
		Arch    string  `json:"arch"`
		Cores   int     `json:"cores"` // available to this process
		Best    string  `json:"simd_best"`
		Current string  `json:"simd_current"`
		Peak    float64 `json:"peak_flops_per_s"` // of a product of fp32 matrices, all cores
	} `json:"cpu"`
	Memory struct {
		Total     int64   `json:"total_bytes"` // 0: not known
		Available int64   `json:"available_bytes"`
		Lockable  *int64  `json:"lockable_bytes"`        // null: no limit
		Copy      float64 `json:"copy_bytes_per_second"` // read + written, all cores
		StoredIn  string  `json:"stored_in"`             // empty: storing failed, see warning
		Warning   string  `json:"warning"`
	} `json:"memory"`
	GPU       gpuReport      `json:"gpu"`
	Libraries []libraryState `json:"libraries"`
	Disk      *diskReport    `json:"disk"` // null: --disk was not given
}

// gpuReport is NVML's description of the GPUs.
type gpuReport struct {
	Driver string     `json:"driver"`
	GPUs   []gpuState `json:"gpus"`
	Note   string     `json:"note"` // why there are none
}

type gpuState struct {
	Name  string `json:"name"`
	UUID  string `json:"uuid"`
	Total int64  `json:"total_bytes"`
	Used  int64  `json:"used_bytes"`
}

// libraryState is a library that is opened at run time, by the first of its names that is found.
type libraryState struct {
	Library string   `json:"library"`
	For     string   `json:"for"`
	Found   string   `json:"found"` // a name; empty: none
	Tried   []string `json:"tried"`
}

type diskReport struct {
	Dir        string         `json:"dir"`
	Filesystem string         `json:"filesystem"`
	Samples    []store.Sample `json:"samples"`
	Chosen     store.Tuning   `json:"chosen"`
	StoredIn   string         `json:"stored_in"` // empty: storing failed, see warnings
	Warnings   []string       `json:"warnings"`
}

// Libraries lists the libraries that are opened at run time, newest names first.
var Libraries = []struct {
	name, use string
	names     []string
}{
	{"CUDA driver", "--device cuda", driver.Names},
	{"NVML", "facts about GPUs", nvml.Names},
	{"cuBLASLt", "matrix products on GPUs", blas.Names},
	{"NVRTC", nvrtcUse(), nvrtc.Names},
	{"NCCL", "GPUs that work together", libnccl.Names},
	{"MPI", "ranks on several nodes", []string{"libmpi.so.40", "libmpi.so.12", "libmpi.so"}},
}

// Command returns the command doctor.
func Command() *cobra.Command {
	var jsonPath, dir string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Describe this machine, and measure its memory and a disk",
		Long: `Describe this machine: processor, memory and how much of it may be
locked, GPUs, libraries that are opened at run time. Measure the memory's
bandwidth, which is stored for plan --gpu detect. With --disk, write and read a file of 256 MiB in that folder with
several block sizes and queue depths, and store the best for later runs on that
filesystem.`,
		Args: cli.NoArguments,
	}
	cmd.Flags().StringVar(&dir, "disk", "", "measure the disk that `DIR` is on")
	cmd.Flags().StringVar(&jsonPath, "json", "", "write the result as JSON to `FILE`, - for stdout")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		d, err := diagnose(cmd.Context(), dir, store.Effort{})
		if err != nil {
			return err
		}
		if jsonPath != "-" {
			d.print(cmd.OutOrStdout())
		}
		return cli.WriteJSON(cmd.OutOrStdout(), jsonPath, d)
	}
	return cmd
}

func diagnose(ctx context.Context, dir string, effort store.Effort) (*Diagnosis, error) {
	d := &Diagnosis{GPU: findGPUs()}
	d.CPU.Model, d.CPU.Arch, d.CPU.Cores = calibration.CPUModel(), runtime.GOARCH, runtime.GOMAXPROCS(0)
	d.CPU.Best, d.CPU.Current = level.Best().String(), level.Current().String()
	d.Memory.Total, d.Memory.Available = memorySizes()
	d.Memory.Lockable = lockableBytes()
	d.Memory.Copy = copyBandwidth(200 * time.Millisecond)
	peak, err := calibration.MeasurePeak(d.CPU.Cores)
	if err != nil {
		return nil, err
	}
	d.CPU.Peak = peak.PerS
	if _, err = calibration.KeepPeak(peak); err != nil {
		d.Memory.Warning = err.Error()
	}
	if d.Memory.StoredIn, err = calibration.KeepMemoryBandwidth(d.Memory.Copy); err != nil {
		d.Memory.StoredIn, d.Memory.Warning = "", err.Error()
	}
	version := driverVersion()
	for _, l := range Libraries {
		names := dynlib.UpTo(version, l.names...)
		d.Libraries = append(d.Libraries, libraryState{l.name, l.use, openable(names), names})
	}
	if dir == "" {
		return d, nil
	}
	r := &diskReport{Dir: dir, Filesystem: store.FilesystemOf(dir)}
	r.Samples, r.Chosen, err = store.Measure(ctx, dir, effort, func(s string) { r.Warnings = append(r.Warnings, s) })
	if err != nil {
		return nil, fmt.Errorf("--disk %s: %w", dir, err)
	}
	if r.StoredIn, err = store.SaveTuning(dir, r.Chosen); err != nil {
		r.StoredIn = ""
		r.Warnings = append(r.Warnings, err.Error())
	}
	d.Disk = r
	return d, nil
}

// copyBandwidth measures memory copies by all cores, in bytes read and written per second.
func copyBandwidth(long time.Duration) float64 {
	n := runtime.GOMAXPROCS(0)
	size := max(8<<20, 128<<20/n) // well above a core's share of the caches
	var wg sync.WaitGroup
	speeds := make([]float64, n)
	for i := range n {
		wg.Go(func() {
			defer crash.Guard()
			from, to := make([]byte, size), make([]byte, size)
			for j := range from {
				from[j] = byte(j)
			}
			copy(to, from)
			start, moved := time.Now(), 0
			for time.Since(start) < long {
				moved += 2 * copy(to, from)
			}
			speeds[i] = float64(moved) / time.Since(start).Seconds()
		})
	}
	wg.Wait()
	sum := 0.0
	for _, s := range speeds {
		sum += s
	}
	return sum
}

// field returns the value of the first "name : value" line.
func field(text, name string) string {
	for _, line := range strings.Split(text, "\n") {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == name {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

func memorySizes() (total, available int64) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, 0
	}
	kib := func(name string) (n int64) {
		if _, err := fmt.Sscanf(field(string(text), name), "%d kB", &n); err != nil {
			return 0
		}
		return n << 10
	}
	return kib("MemTotal"), kib("MemAvailable")
}

func gbps(v float64) string { return fmt.Sprintf("%.2f GB/s", v/1e9) }

func (d *Diagnosis) print(w io.Writer) {
	line := func(what, format string, args ...any) {
		fmt.Fprintf(w, "%-10s %s\n", what, fmt.Sprintf(format, args...))
	}
	line("cpu", "%s (%s), %d cores for this process, SIMD %s%s", cmp.Or(d.CPU.Model, "unknown model"), d.CPU.Arch, d.CPU.Cores, d.CPU.Best,
		map[bool]string{true: "", false: ", limited to " + d.CPU.Current + " by SPILLWAY_SIMD"}[d.CPU.Best == d.CPU.Current])
	line("", "%.0f GFLOP/s at a product of %d rows and columns of fp32, for model_flops_share of train --metrics", d.CPU.Peak/1e9, calibration.PeakSize)
	size := "of unknown size"
	if d.Memory.Total > 0 {
		size = fmt.Sprintf("%s, %s available", plan.Bytes(d.Memory.Total), plan.Bytes(d.Memory.Available))
	}
	line("memory", "%s; copies %s (read + written)", size, gbps(d.Memory.Copy))
	if d.Memory.StoredIn != "" {
		line("", "kept in %s", d.Memory.StoredIn)
	} else {
		line("", "%s", d.Memory.Warning)
	}
	if d.Memory.Lockable == nil {
		line("locking", "no limit")
	} else {
		line("locking", "this process may lock %s (RLIMIT_MEMLOCK); host memory beyond it is used unlocked, or refused with --require-pinned", plan.Bytes(*d.Memory.Lockable))
	}
	if d.GPU.Note != "" {
		line("gpu", "none: %s", d.GPU.Note)
	}
	for i, g := range d.GPU.GPUs {
		line("gpu", "%d: %s, %s, %s in use (driver %s)", i, g.Name, plan.Bytes(g.Total), plan.Bytes(g.Used), d.GPU.Driver)
	}
	for _, l := range d.Libraries {
		if l.Found != "" {
			line("library", "%s: %s (%s)", l.Library, l.Found, l.For)
		} else {
			why := "looked for " + strings.Join(l.Tried, ", ")
			if err := dl.Err(); err != nil {
				why = err.Error()
			}
			line("library", "%s: not found (%s; %s)", l.Library, l.For, why)
		}
	}
	if d.Disk == nil {
		line("disk", "not measured (give --disk DIR)")
		return
	}
	line("disk", "%s on %s", d.Disk.Dir, d.Disk.Filesystem)
	for _, text := range d.Disk.Warnings {
		line("", "%s", text)
	}
	line("", "%9s %6s %12s %12s", "block", "depth", "read", "write")
	for _, s := range d.Disk.Samples {
		mark := ""
		if s.Block == d.Disk.Chosen.Block && s.Depth == d.Disk.Chosen.Depth {
			mark = "  chosen"
		}
		line("", "%9s %6d %12s %12s%s", plan.Bytes(int64(s.Block)), s.Depth, gbps(s.Read), gbps(s.Write), mark)
	}
	if d.Disk.StoredIn != "" {
		line("", "kept in %s", d.Disk.StoredIn)
	}
}

// driverVersion returns the CUDA version of the driver, such as 12040; 0: there is no driver.
func driverVersion() int {
	api, err := driver.Open()
	if err != nil {
		return 0
	}
	version, err := api.Version()
	if err != nil {
		return 0
	}
	return version
}

// nvrtcUse returns the use of NVRTC in this build.
func nvrtcUse() string {
	if images.There() {
		return "kernels that this build does not embed"
	}
	return "kernels compiled at run time"
}

// openable returns the name of the first of train's candidates that can be opened.
func openable(names []string) string {
	for _, name := range dynlib.Candidates(names...) {
		if h, err := dl.Open(name, dl.Lazy|dl.Local); err == nil {
			_ = dl.Close(h)
			return name
		}
	}
	return ""
}
