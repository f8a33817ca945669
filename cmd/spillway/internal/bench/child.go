package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
)

// stepLine is a line that a training program prints for a step, or at its end: of train's
// --metrics, or of the peer.
type stepLine struct {
	Event       string   `json:"event"`
	Step        int      `json:"step"`
	Loss        *float64 `json:"loss"`
	Seconds     float64  `json:"seconds"`
	DevicePeak  []int64  `json:"device_peak_bytes"`
	CommBytes   int64    `json:"comm_bytes"`
	DataWait    float64  `json:"data_wait_s"`
	FlopsShare  *float64 `json:"model_flops_share"`
	Hidden      *float64 `json:"comm_hidden_share"`
	CommSeconds float64  `json:"comm_seconds"`
	SHA256      string   `json:"params_sha256"`
	Missing     string   `json:"missing"`        // why the program cannot run the job
	Resident    int64    `json:"resident_bytes"` // a rank's peak, less its resident memory before the model
	By          string   `json:"by"`             // the program and its version
	SystemShare float64  `json:"system_share"`   // share of the peer's processor time, after the first step
	PageFaults  int64    `json:"page_faults"`    // of a rank of the peer in a step
}

// outcome is one run of a program.
type outcome struct {
	steps    []stepLine
	done     stepLine
	resident int64 // the process's peak in bytes; 0: not known
}

// failed is the error of a program that ended with a nonzero status.
type failed struct {
	status int
	text   string // the first line of its error
}

func (f *failed) Error() string { return f.text }

// runProgram runs a program to its end and calls each for every step. It reads standard error for
// the error message.
func runProgram(ctx context.Context, argv, env []string, each func(stepLine)) (o outcome, err error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	var words bytes.Buffer
	cmd.Stderr = &words
	out, err := cmd.StdoutPipe()
	if err != nil {
		return o, err
	}
	if err := cmd.Start(); err != nil {
		return o, err
	}
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		var line stepLine
		if !bytes.HasPrefix(lines.Bytes(), []byte("{")) || json.Unmarshal(lines.Bytes(), &line) != nil {
			continue
		}
		o.resident = max(o.resident, residentPeak(cmd.Process.Pid))
		if line.Event != "" || line.Missing != "" {
			if line.Event == "done" || line.Missing != "" {
				o.done = line
			}
			continue
		}
		o.steps = append(o.steps, line)
		each(line)
	}
	err = errors.Join(lines.Err(), cmd.Wait())
	if err != nil && ctx.Err() != nil {
		return o, ctx.Err()
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		err = &failed{exit.ExitCode(), lastWords(words.String())}
	}
	return o, err
}

// lastWords returns the error message of a program: Spillway's error line, or else the last line.
func lastWords(text string) string {
	last := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if said, ok := strings.CutPrefix(line, "spillway: "); ok {
			return said
		}
		if line != "" {
			last = line
		}
	}
	if last == "" {
		return "it said nothing"
	}
	return cli.Visible(last)
}

// residentPeak returns the peak of a process's resident memory in bytes; 0: not known. It is not
// read from the resource usage of the ended process, because that starts with the peak of its
// parent.
func residentPeak(pid int) int64 { return statusBytes(pid, "VmHWM:") }

// statusBytes returns a line of /proc/PID/status in bytes.
func statusBytes(pid int, name string) int64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		if v, ok := strings.CutPrefix(line, name); ok {
			n, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(v), "kB")), 10, 64)
			return n << 10
		}
	}
	return 0
}
