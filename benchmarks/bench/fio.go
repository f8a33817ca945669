package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
)

// Fio is a job of fio, the peer of benchmarks of files: a sequential direct transfer of one file.
type Fio struct {
	File   string
	Write  bool // otherwise the file is read
	Bytes  int64
	Block  int    // bytes
	Depth  int    // blocks in flight
	Engine string // libaio or io_uring
	Sync   bool   // the time of a write includes syncing the file
}

// FindFio returns an error if fio is not installed.
func FindFio() error {
	if _, err := exec.LookPath("fio"); err != nil {
		return errors.New("fio is not in the PATH; it is a package of most distributions")
	}
	return nil
}

// Run runs the job and returns its bytes per second, as fio reports them.
func (j Fio) Run() (float64, error) {
	rw := "read"
	if j.Write {
		rw = "write"
	}
	args := []string{"--name=pair", "--filename=" + j.File, "--rw=" + rw, "--direct=1", "--ioengine=" + j.Engine, fmt.Sprintf("--bs=%d", j.Block),
		fmt.Sprintf("--iodepth=%d", j.Depth), fmt.Sprintf("--size=%d", j.Bytes), "--output-format=json"}
	if j.Sync {
		args = append(args, "--end_fsync=1")
	}
	out, err := exec.Command("fio", args...).Output()
	if err != nil {
		return 0, fmt.Errorf("fio: %w", err)
	}
	return j.rate(out)
}

// rate reads fio's report of the job.
func (j Fio) rate(report []byte) (float64, error) {
	var r struct {
		Jobs []struct {
			Read, Write struct {
				Bytes   int64 `json:"io_bytes"`
				Runtime int64 // ms
			}
		}
	}
	if err := json.Unmarshal(report, &r); err != nil {
		return 0, fmt.Errorf("fio's report: %w", err)
	}
	if len(r.Jobs) != 1 {
		return 0, fmt.Errorf("fio's report is of %d jobs, want 1", len(r.Jobs))
	}
	side := r.Jobs[0].Read
	if j.Write {
		side = r.Jobs[0].Write
	}
	if side.Bytes != j.Bytes || side.Runtime <= 0 {
		return 0, fmt.Errorf("fio moved %d bytes in %d ms, want %d", side.Bytes, side.Runtime, j.Bytes)
	}
	return float64(side.Bytes) / float64(side.Runtime) * 1000, nil
}
