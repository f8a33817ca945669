package bench

import (
	"encoding/json"
	"math"
	"slices"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/algo"
)

// rowVersion changes when the meaning of a row's key changes.
const rowVersion = 1

// Row holds the measurements of one configuration. A row of --json is self-contained, with null for
// missing measurements. Bytes are those of the rank with the most; times are in seconds.
type Row struct {
	Version int `json:"version"`
	// The next six keys are guaranteed for each stage.
	Zero              int     `json:"zero"`
	DevicePeakBytes   int64   `json:"device_peak_bytes"` // touched
	StepSecondsMedian float64 `json:"step_seconds_median"`
	TokensPerS        float64 `json:"tokens_per_s"`
	CommBytesPerStep  int64   `json:"comm_bytes_per_step"`
	LossLast          float64 `json:"loss_last"`

	Name      string   `json:"name"`
	By        string   `json:"by"`                // the program and its version
	Command   []string `json:"command"`           // argument list
	Vary      string   `json:"vary,omitempty"`    // the difference from the stage of the same number
	Missing   string   `json:"missing,omitempty"` // why it did not run
	Machine   Machine  `json:"machine"`
	Model     string   `json:"model"`
	Precision string   `json:"precision"`
	Ranks     int      `json:"ranks"`
	Batch     int      `json:"batch"`
	Seq       int      `json:"seq"`
	Accum     int      `json:"accum"`

	PlannedBytes  int64            `json:"device_planned_bytes"`
	ByClass       map[string]int64 `json:"by_class,omitempty"`
	ClassPeak     map[string]int64 `json:"class_peak_bytes,omitempty"`
	ResidentBytes int64            `json:"resident_peak_bytes"` // a rank's share of the processes' peaks, less their resident memory before the model

	Warmup      int         `json:"warmup_steps"` // uncounted first steps of each round
	Rounds      [][]float64 `json:"step_seconds"` // by round, the counted steps
	P10         float64     `json:"step_seconds_p10"`
	P90         float64     `json:"step_seconds_p90"`
	Predicted   *float64    `json:"predicted_seconds"`    // null: no prediction
	Exposed     float64     `json:"comm_exposed_seconds"` // median: time of a rank in collectives, including waits, while it computed nothing
	DataWait    float64     `json:"data_wait_seconds"`    // median
	FlopsShare  *float64    `json:"model_flops_share"`    // median; null: not known
	HiddenShare *float64    `json:"comm_hidden_share"`    // median; null: nothing was sent, or not known

	TextbookBytes int64            `json:"comm_textbook_bytes"`
	Sent          map[string]int64 `json:"comm_bytes_by_collective,omitempty"` // planned
	Textbook      map[string]int64 `json:"comm_textbook_by_collective,omitempty"`

	Losses []float64 `json:"losses"` // of every step of a round
	SHA256 string    `json:"params_sha256,omitempty"`

	SystemShare float64 `json:"system_share,omitempty"` // of the peer's processor time, after the first step
	PageFaults  int64   `json:"page_faults,omitempty"`  // of the peer, a step

	*Scaling // for bench scale; nil in bench zero
}

// MarshalJSON writes null for missing measurements.
func (r *Row) MarshalJSON() ([]byte, error) {
	type row Row
	if r.StepSecondsMedian > 0 {
		return json.Marshal((*row)(r))
	}
	var perS *float64 // simulated rows have tokens a second
	if r.TokensPerS > 0 {
		perS = &r.TokensPerS
	}
	return json.Marshal(struct { // its keys hide those of row
		*row
		DevicePeakBytes   *int     `json:"device_peak_bytes"`
		StepSecondsMedian *int     `json:"step_seconds_median"`
		TokensPerS        *float64 `json:"tokens_per_s"`
		CommBytesPerStep  *int     `json:"comm_bytes_per_step"`
		LossLast          *int     `json:"loss_last"`
		ResidentBytes     *int     `json:"resident_peak_bytes"`
		P10               *int     `json:"step_seconds_p10"`
		P90               *int     `json:"step_seconds_p90"`
		Exposed           *int     `json:"comm_exposed_seconds"`
		DataWait          *int     `json:"data_wait_seconds"`
	}{row: (*row)(r), TokensPerS: perS})
}

// Machine describes the machine that the rows were measured on.
type Machine struct {
	CPU     string  `json:"cpu"`
	Cores   int     `json:"cores"`
	SIMD    string  `json:"simd"`
	Peak    float64 `json:"peak_flops_per_s"` // of a product of fp32 matrices
	Rates   string  `json:"predicted_from"`
	Day     string  `json:"day"`
	Version string  `json:"spillway"`
}

// take adds the run of a round.
func (r *Row) take(o outcome, warmup int) {
	var seconds []float64
	for _, s := range o.steps[min(warmup, max(len(o.steps)-1, 0)):] {
		seconds = append(seconds, s.Seconds)
	}
	r.Rounds = append(r.Rounds, seconds)
}

// finish computes the values that follow from the rounds; last is the newest run.
func (r *Row) finish(last outcome, warmup int) {
	all := slices.Concat(r.Rounds...)
	r.StepSecondsMedian, r.P10, r.P90 = quantile(all, 0.5), quantile(all, 0.1), quantile(all, 0.9)
	r.TokensPerS = float64(r.Ranks*r.Batch*r.Accum*r.Seq) / r.StepSecondsMedian
	r.Losses = nil
	var waits, shares, hidden, exposed []float64
	for i, s := range last.steps {
		if s.Loss != nil {
			r.Losses, r.LossLast = append(r.Losses, *s.Loss), *s.Loss
		}
		if i < warmup && i < len(last.steps)-1 {
			continue
		}
		waits = append(waits, s.DataWait)
		if s.FlopsShare != nil {
			shares = append(shares, *s.FlopsShare)
		}
		if len(s.DevicePeak) > 0 {
			r.DevicePeakBytes = slices.Max(s.DevicePeak)
		}
		r.CommBytesPerStep = s.CommBytes / int64(r.Ranks)
		exposed = append(exposed, s.CommSeconds)
		if s.Hidden != nil {
			hidden = append(hidden, *s.Hidden)
			exposed[len(exposed)-1] *= 1 - *s.Hidden
		}
	}
	r.DataWait, r.Exposed, r.SHA256 = quantile(waits, 0.5), quantile(exposed, 0.5), last.done.SHA256
	r.FlopsShare, r.HiddenShare = medianOrNil(shares), medianOrNil(hidden)
	r.SystemShare, r.PageFaults = last.done.SystemShare, last.done.PageFaults
}

func medianOrNil(v []float64) *float64 {
	if len(v) == 0 {
		return nil
	}
	m := quantile(v, 0.5)
	return &m
}

// quantile returns the value below which a share q of the values is, interpolated.
func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(values))
	at := q * float64(len(s)-1)
	low := int(math.Floor(at))
	high := min(low+1, len(s)-1)
	return s[low] + (at-float64(low))*(s[high]-s[low])
}

// Scaling holds the further values of a row of bench scale. The first six are guaranteed, with
// ranks.
type Scaling struct {
	Mode           string   `json:"mode"` // strong: the same rows of a step; weak: the same rows for each rank
	Overlap        bool     `json:"overlap"`
	Seconds        *float64 `json:"seconds"`    // of a step, the median; null: it did not run
	Efficiency     *float64 `json:"efficiency"` // against the fewest ranks of the mode
	Oversubscribed bool     `json:"oversubscribed"`
	Simulated      bool     `json:"simulated"` // on the cost model alone

	// Speed is the speed of the machine in each round, by the yardstick; 2: twice as fast as
	// predicted. AtSpeed is the median of the steps' times × Speed.
	Speed   []float64 `json:"machine_speed,omitempty"`
	AtSpeed *float64  `json:"seconds_at_speed,omitempty"`
}

// CommRow is a measurement of a collective.
type CommRow struct {
	Transport  string    `json:"transport"`
	Ranks      int       `json:"ranks"`
	Op         comm.Op   `json:"op"`
	Algorithm  algo.Name `json:"algorithm"`
	Bytes      int64     `json:"bytes"`            // of the whole buffer
	Seconds    float64   `json:"seconds"`          // of one operation: the median of several runs
	BytesPerS  float64   `json:"bytes_per_s"`      // Bytes over Seconds
	Bound      float64   `json:"bound_seconds"`    // by memory, with all ranks on one host; 0: not known
	CopyPerS   float64   `json:"copy_bytes_per_s"` // read and written, all ranks at once
	Operations int       `json:"operations"`
	Reckoned   float64   `json:"reckoned_seconds"`       // by algo.Cluster
	Peer       float64   `json:"peer_seconds,omitempty"` // of the MPI library's own collective

	perHost int // neighbouring ranks that share a host
}
