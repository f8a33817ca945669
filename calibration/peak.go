package calibration

import (
	"fmt"
	"time"

	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// The product whose rate is the machine's peak: PeakSize × PeakSize matrices in fp32, the
// fastest of peakRuns.
const (
	PeakSize = 1024
	peakRuns = 9
)

// Peak is the highest FLOP/s that a product reached with a number of threads on this machine.
type Peak struct {
	Threads int       `json:"threads"`
	CPU     string    `json:"cpu"`
	SIMD    string    `json:"simd"`
	PerS    float64   `json:"flops_per_s"`
	At      time.Time `json:"measured"`
}

// MeasurePeak multiplies two matrices a few times; it takes a fraction of a second.
func MeasurePeak(threads int) (p Peak, err error) {
	spec := gemm.Forward(PeakSize, PeakSize, PeakSize, false)
	product, err := gemm.New(spec)
	if err != nil {
		return p, fmt.Errorf("measure the peak: %w", err)
	}
	operand := func() []float32 {
		v := make([]float32, PeakSize*PeakSize)
		for i := range v {
			v[i] = float32(i%7) / 8 // reads of pages that were never written would be too fast
		}
		return v
	}
	a, b, c := operand(), operand(), operand()
	work := make([]byte, gemm.Workspace(spec))
	workers := pool.New(threads)
	best := time.Duration(1<<63 - 1)
	for range peakRuns {
		began := time.Now()
		if err := product.Run(workers, a, b, c, nil, work); err != nil {
			return p, fmt.Errorf("measure the peak: %w", err)
		}
		best = min(best, time.Since(began))
	}
	return Peak{Threads: threads, CPU: CPUModel(), SIMD: level.Current().String(), At: time.Now().UTC().Truncate(time.Second),
		PerS: 2 * PeakSize * PeakSize * PeakSize / best.Seconds()}, nil
}

// KeepPeak stores a measured peak, and replaces an older one for the same number of threads.
func KeepPeak(p Peak) (path string, err error) {
	return keep(func(k *keptMachine) {
		if k.Peaks == nil {
			k.Peaks = map[int]Peak{}
		}
		k.Peaks[p.Threads] = p
	})
}

// KeptPeak returns the stored peak for a number of threads; false if no valid one is stored.
func KeptPeak(threads int) (p Peak, ok bool) {
	p, ok = kept().Peaks[threads]
	return p, ok && p.CPU == CPUModel() && p.SIMD == level.Current().String() && time.Since(p.At) < calibrationAge
}

// PeakOf returns the FLOP/s that a process may reach with the given threads while it computes
// concurrently with the others of processes processes on this machine. It is the stored peak of
// those threads, or the process's share of the peak of all processes' threads together. 0: neither
// was measured.
func PeakOf(threads, processes int) float64 {
	if p, ok := KeptPeak(threads); ok {
		return p.PerS
	}
	processes = max(processes, 1)
	p, _ := KeptPeak(threads * processes)
	return p.PerS / float64(processes)
}
