package train

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/filesys"
)

// MetricsWriter writes a run's JSON lines, one object per line, each flushed. A partly written
// line is overwritten by the next one.
type MetricsWriter struct {
	f     *os.File
	plain bool  // a regular file, whose incomplete lines can be overwritten
	end   int64 // of the last whole line
	ahead int   // newest step of the removed lines
	// Outside is a rank's device memory outside its arena, in bytes, as measured on a GPU; 0:
	// unknown.
	Outside int64
}

// Dropped returns the newest step in the lines that OpenMetrics removed. Those lines are from an
// earlier attempt, which got further than the checkpoint that this run resumes from. 0: no lines
// were removed.
func (m *MetricsWriter) Dropped() int { return m.ahead }

// OpenMetrics creates the file and its folder. For a run that resumes after step it keeps the lines
// up to that step, and removes later or incomplete lines of an earlier attempt. With step −1, a new
// run, the file starts empty. A file that another run writes to is refused, and so is one that
// holds no metrics.
func OpenMetrics(path string, step int) (*MetricsWriter, error) {
	if err := refuseForeign("Config.Metrics", path, metricsHeads...); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		return nil, fmt.Errorf("Config.Metrics: %w", err)
	}
	if st, err := os.Stat(path); err == nil && st.Mode()&os.ModeNamedPipe != 0 {
		f, err := openPipe(path)
		if err != nil {
			return nil, fmt.Errorf("Config.Metrics: %w", err)
		}
		return &MetricsWriter{f: f}, nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o666)
	if errors.Is(err, os.ErrPermission) || errors.Is(err, syscall.ENXIO) || errors.Is(err, syscall.EINVAL) {
		if again, againErr := os.OpenFile(path, os.O_WRONLY, 0); !errors.Is(againErr, os.ErrNotExist) { // otherwise err says why it could not be created
			f, err = again, againErr
		}
	}
	if err != nil {
		return nil, fmt.Errorf("Config.Metrics: %w", err)
	}
	m := &MetricsWriter{f: f}
	st, err := f.Stat()
	if err == nil && st.Mode().IsRegular() {
		m.plain = true
		err = lockMetrics(f, step >= 0)
		if err == nil && step >= 0 {
			m.end, m.ahead, err = linesUpTo(f, step)
		}
		if err == nil {
			err = f.Truncate(m.end)
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("Config.Metrics: %w", err), f.Close())
	}
	return m, nil
}

// killedFor is how long a killed process may still hold the locks of its files, because the kernel
// frees its memory first.
const killedFor = 5 * time.Second

// lockMetrics refuses a file that another run writes to. A run that resumes may follow a killed
// process, and waits for its end. On a file system without locks no file is refused.
func lockMetrics(f *os.File, resumes bool) error {
	for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		locked, err := filesys.TryLock(f)
		if locked || err != nil {
			return nil
		}
		if !resumes || time.Since(began) > killedFor {
			return fmt.Errorf("%.80q: another run writes its lines there; "+
				"give this run a file of its own, or wait for the end of the other", f.Name())
		}
	}
}

// metricsHeads are the possible beginnings of a metrics file.
var metricsHeads = []string{`{"step":`, `{"event":`}

// refuseForeign refuses an existing file that does not begin like a file that field writes. The run
// would overwrite somebody's file.
func refuseForeign(field, path string, heads ...string) error {
	st, err := os.Stat(path)
	if err != nil || !st.Mode().IsRegular() {
		return nil // a file that can't be written is an error when it is opened
	}
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	begin, err := io.ReadAll(io.LimitReader(f, 64))
	if err != nil {
		return fmt.Errorf("%s: %w", field, err)
	}
	for _, head := range heads {
		if n := min(len(begin), len(head)); string(begin[:n]) == head[:n] {
			return nil
		}
	}
	return fmt.Errorf("%s %.80q is there already and holds no %s; give another file, or remove it", field, path,
		strings.ToLower(strings.TrimPrefix(field, "Config.")))
}

// linesUpTo finds the complete lines up to step and returns their end. It stops at the first line
// that is incomplete or of a later step; ahead is the newest step from there on. A final line with
// event "done" is left out, because the resumed run writes it again.
func linesUpTo(r io.Reader, step int) (end int64, ahead int, err error) {
	lines := bufio.NewReader(r)
	var dones int64 // bytes of "done" lines after end
	for kept := true; ; {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return end, ahead, nil
		}
		if err != nil {
			return 0, 0, err
		}
		var v struct {
			Event string `json:"event"`
			Step  int    `json:"step"`
		}
		whole := json.Unmarshal(line, &v) == nil
		switch kept = kept && whole && v.Step <= step; {
		case kept && v.Event == "done":
			dones += int64(len(line))
		case kept:
			end, dones = end+dones+int64(len(line)), 0
		case whole && v.Step > step:
			ahead = max(ahead, v.Step)
		}
	}
}

// number returns a JSON number, the shortest decimal that round-trips the type; null if v is not
// finite.
func number(v float64, bits int) json.RawMessage {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return json.RawMessage("null")
	}
	return json.RawMessage(strconv.FormatFloat(v, 'g', -1, bits))
}

type stepLine struct {
	Step          int             `json:"step"`
	Rows          int             `json:"rows"`
	Loss          json.RawMessage `json:"loss"`
	Accuracy      json.RawMessage `json:"accuracy"`
	LR            json.RawMessage `json:"lr"`
	GradNorm      json.RawMessage `json:"grad_norm"`
	NoiseScale    json.RawMessage `json:"noise_scale"`
	NoiseError    json.RawMessage `json:"noise_scale_error"`
	GradSquare    json.RawMessage `json:"noise_grad_square"`
	GradTrace     json.RawMessage `json:"noise_trace"`
	LossScale     json.RawMessage `json:"loss_scale"`
	Skipped       bool            `json:"skipped"`
	SkippedAll    int             `json:"skipped_steps,omitempty"`
	Targets       int64           `json:"targets"`
	Seconds       json.RawMessage `json:"seconds"`
	TokensPerS    json.RawMessage `json:"tokens_per_s"`
	DevicePeak    []int64         `json:"device_peak_bytes"`
	DevicePlanned []int64         `json:"device_planned_bytes"`
	DeviceOutside int64           `json:"device_outside_bytes,omitempty"`
	HostPeak      []int64         `json:"host_peak_bytes"`
	HostPlanned   []int64         `json:"host_planned_bytes"`
	DiskPeak      []int64         `json:"disk_peak_bytes"`
	DiskPlanned   []int64         `json:"disk_planned_bytes"`
	CommBytes     int64           `json:"comm_bytes"`
	DiskRead      int64           `json:"disk_read_bytes"`
	DiskWritten   int64           `json:"disk_written_bytes"`
	Cached        bool            `json:"frozen_cached,omitempty"`
	DataWait      json.RawMessage `json:"data_wait_s"`
	FlopsShare    json.RawMessage `json:"model_flops_share"`
	MFU           json.RawMessage `json:"mfu,omitempty"` // FlopsShare if it is known
	Hidden        json.RawMessage `json:"comm_hidden_share,omitempty"`
	CommSeconds   json.RawMessage `json:"comm_seconds,omitempty"`
}

// Step writes a step's line, and the line of its evaluation if it has one.
func (m *MetricsWriter) Step(r StepResult) error {
	if r.EvalOnly {
		return m.evaluation(r.Eval)
	}
	line := stepLine{
		Step: r.Step, Rows: r.Rows, Loss: number(float64(r.Loss), 32), Accuracy: number(r.Accuracy, 64), LR: number(r.LR, 64), GradNorm: number(r.GradNorm, 64),
		NoiseScale: number(r.Noise.Scale, 64), NoiseError: number(r.Noise.Error, 64), GradSquare: number(r.Noise.Square, 64), GradTrace: number(r.Noise.Trace, 64), LossScale: number(r.LossScale, 64),
		Skipped: r.Skipped, SkippedAll: r.SkippedAll, Targets: r.Targets, Seconds: number(r.Seconds, 64), TokensPerS: number(r.TokensPerS, 64),
		DevicePeak: r.Peak[graph.Device], DevicePlanned: r.Planned[graph.Device], DeviceOutside: m.Outside,
		HostPeak: r.Peak[graph.Host], HostPlanned: r.Planned[graph.Host],
		DiskPeak: r.Peak[graph.Disk], DiskPlanned: r.Planned[graph.Disk],
		CommBytes: r.CommBytes, DiskRead: r.DiskRead, DiskWritten: r.DiskWritten, Cached: r.Cached,
		DataWait: number(r.DataWait, 64), FlopsShare: number(r.FlopsShare, 64),
	}
	if !math.IsNaN(r.FlopsShare) {
		line.MFU = line.FlopsShare
	}
	if r.Comm != nil {
		sum := 0.0
		for _, c := range r.Comm {
			sum += c.Seconds
		}
		line.CommSeconds, line.Hidden = number(sum/float64(len(r.Peak[graph.Device])), 64), number(r.Overlap, 64)
	}
	err := m.line(line)
	if err != nil || r.Eval == nil {
		return err
	}
	return m.evaluation(r.Eval)
}

func (m *MetricsWriter) evaluation(r *EvalResult) error {
	return m.line(struct {
		Event    string          `json:"event"`
		Step     int             `json:"step"`
		Loss     json.RawMessage `json:"loss"`
		Accuracy json.RawMessage `json:"accuracy"`
		Targets  int64           `json:"targets"`
		Seconds  json.RawMessage `json:"seconds"`
	}{"eval", r.Step, number(float64(r.Loss), 32), number(r.Accuracy, 64), r.Targets, number(r.Seconds, 64)})
}

// Done writes the last line.
func (m *MetricsWriter) Done(step int, paramsSHA256 string) error {
	return m.line(struct {
		Event  string `json:"event"`
		Step   int    `json:"step"`
		SHA256 string `json:"params_sha256"`
	}{"done", step, paramsSHA256})
}

func (m *MetricsWriter) line(v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("Config.Metrics: %w", err)
	}
	text = append(text, '\n')
	if m.plain {
		_, err = m.f.WriteAt(text, m.end)
	} else {
		_, err = m.f.Write(text)
	}
	if err != nil {
		if m.plain { // removes the incomplete line
			err = errors.Join(err, m.f.Truncate(m.end))
		}
		return fmt.Errorf("Config.Metrics: %w", err)
	}
	m.end += int64(len(text))
	return nil
}

// Close closes the file.
func (m *MetricsWriter) Close() error {
	if m == nil {
		return nil
	}
	if err := m.f.Close(); err != nil {
		return fmt.Errorf("Config.Metrics: %w", err)
	}
	return nil
}
