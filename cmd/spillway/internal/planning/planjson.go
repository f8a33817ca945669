package planning

import (
	"encoding/json"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/planner"
)

// The contract's names.
type (
	// Doc is what --json writes.
	Doc struct {
		Model     planModel   `json:"model"`
		Ranks     int         `json:"ranks"`
		Batch     int         `json:"batch"`
		Seq       int         `json:"seq"`
		Requested planStage   `json:"requested"`
		Stages    []planStage `json:"stages"`
		// Explanation says what of the requested plan is made twice or moved, in
		// names that --recompute and --offload take.
		Explanation planWhy          `json:"explanation"`
		Recommended *planRecommended `json:"recommended"` // null: nothing fits
		// Epilogues are those of a GPU's 16-bit products that change bits, by name.
		Epilogues string `json:"epilogues,omitempty"`
		// Server is what the ranks of a server take together.
		Server Server `json:"server"`
		// Time says how step_seconds is known, with --gpu.
		Time *Time `json:"time,omitempty"`
		// Budget is the recommended plan's, with --tokens; the requested one's where none is recommended.
		Budget *Budget `json:"budget,omitempty"`
	}
	// Server is what the ranks of a server take of its memory.
	Server struct {
		Ranks     int64  `json:"ranks"`
		HostBytes int64  `json:"host_bytes"`             // of the requested plan, with what is outside the arenas
		Memory    int64  `json:"memory_bytes,omitempty"` // that it has, given or usual; left out where neither is known
		Source    string `json:"source,omitempty"`
	}
	// Time says that published runs on the GPU took low to high times as long as predicted.
	Time struct {
		Low  float64 `json:"low"`
		High float64 `json:"high"`
		Rows int     `json:"published_runs"`
		Text string  `json:"text"`
	}
	planWhy struct {
		Recompute        string                `json:"recompute"`
		Auto             string                `json:"auto,omitempty"`
		Offload          string                `json:"offload"`
		Recomputed       []planner.BufferGroup `json:"recomputed"`
		RecomputeSeconds float64               `json:"recompute_seconds"` // a step
		Parked           []planParked          `json:"parked"`
		Placed           []planPlaced          `json:"placed"`
		Notes            []string              `json:"notes"`
	}
	planParked struct {
		planner.BufferGroup
		Space string `json:"space"`
	}
	planPlaced struct {
		Class string `json:"class"`
		Space string `json:"space"`
		Units int    `json:"units"`
		Of    int    `json:"of_units"`
		Bytes int64  `json:"bytes"`
	}
	planRecommended struct {
		Flags string    `json:"flags"`
		Notes []string  `json:"notes"`
		Plan  planStage `json:"plan"`
	}
	planModel struct {
		Name       string `json:"name"`
		Parameters int64  `json:"parameters"`
	}
	planStage struct {
		Zero             int     `json:"zero"`
		Fits             bool    `json:"fits"`
		Device           Space   `json:"device"`
		Host             Space   `json:"host"`
		Disk             Space   `json:"disk"`
		CommBytesPerStep int64   `json:"comm_bytes_per_step"` // a rank
		StepSeconds      float64 `json:"step_seconds"`
		// Batches are those of --batch-schedule, the largest first.
		Batches      []planBatch `json:"batches,omitempty"`
		StagingBytes int64       `json:"staging_bytes,omitempty"` // of host.outside_bytes, for saves beside the steps; none: they are synchronous
	}
	planBatch struct {
		Rows        int     `json:"rows"`
		Accum       int     `json:"accum"`
		StepSeconds float64 `json:"step_seconds"`
	}
	// Space is what a rank takes of a space, in bytes.
	Space struct {
		CapacityBytes  *int64           `json:"capacity_bytes"` // null: no cap
		PeakBytes      int64            `json:"peak_bytes"`
		PeakAt         string           `json:"peak_at"`
		OutsideBytes   int64            `json:"outside_bytes"`
		ByClass        map[string]int64 `json:"by_class"`
		ClassPeakBytes map[string]int64 `json:"class_peak_bytes"`
	}
)

// why explains a plan.
func why(f *spillway.Forecast) planWhy {
	e := spillway.Explain(f)
	recompute := f.Config.Recompute
	if recompute == "" {
		recompute = "none"
	}
	w := planWhy{Recompute: recompute, Auto: cli.Flagged(f.Auto), Offload: f.Config.Offload, Recomputed: append([]planner.BufferGroup{}, e.Recomputed...), RecomputeSeconds: e.RecomputeSeconds,
		Parked: []planParked{}, Placed: []planPlaced{}, Notes: cli.Reasons(f)}
	for _, g := range e.Parked {
		w.Parked = append(w.Parked, planParked{g, g.Space.String()})
	}
	for _, p := range e.Placed {
		w.Placed = append(w.Placed, planPlaced{p.Class.String(), p.Space.String(), p.Units, p.Of, p.Bytes})
	}
	return w
}

func (f *Flags) planJSON(asked *spillway.Forecast, stages []*spillway.Forecast, best *spillway.Fitted) ([]byte, error) {
	c := asked.Config
	doc := Doc{Model: planModel{c.Model, asked.Parameters()}, Ranks: c.Ranks, Batch: c.Batch, Seq: c.Seq, Requested: stageJSON(asked)}
	for _, s := range stages {
		doc.Stages = append(doc.Stages, stageJSON(s))
	}
	n := f.ranksAServer(&c)
	doc.Server = Server{Ranks: n, HostBytes: f.onServer(asked, graph.Host), Memory: f.nodeMemory}
	if f.server != nil {
		doc.Server.Memory, doc.Server.Source = n*f.server.Memory, f.server.Source
	}
	if r := f.timeRange(); r != nil {
		doc.Time = &Time{r.Low, r.High, r.Rows, r.Text()}
	}
	doc.Budget = f.budget(asked)
	doc.Explanation, doc.Epilogues = why(asked), asked.Epilogues()
	if best != nil {
		doc.Recommended = &planRecommended{cli.FlagText(best.Choices), cli.FlaggedAll(best.Reasons), stageJSON(best.Forecast)}
		doc.Budget = f.budget(best.Forecast)
	}
	text, err := json.MarshalIndent(doc, "", "  ")
	return append(text, '\n'), err
}

func stageJSON(f *spillway.Forecast) planStage {
	var batches []planBatch
	for _, b := range f.StepTimes() {
		batches = append(batches, planBatch{b.Rows, b.Accum, b.Step.Seconds})
	}
	return planStage{Zero: f.Config.Zero, Batches: batches, Fits: f.Fits, CommBytesPerStep: f.Plan.CommBytes, StepSeconds: f.Step.Seconds, StagingBytes: f.Plan.Config.Staging,
		Device: spaceJSON(f, graph.Device), Host: spaceJSON(f, graph.Host), Disk: spaceJSON(f, graph.Disk)}
}

func spaceJSON(f *spillway.Forecast, s graph.Space) Space {
	use := &f.Plan.Layout.Spaces[s]
	v := Space{PeakBytes: use.Peak, PeakAt: use.PeakAt, OutsideBytes: f.Plan.Config.Outside[s], ByClass: map[string]int64{}, ClassPeakBytes: map[string]int64{}}
	if limit := f.Plan.Config.Capacity[s]; limit > 0 {
		v.CapacityBytes = &limit
	}
	for c := range graph.NumClasses {
		v.ByClass[c.String()], v.ClassPeakBytes[c.String()] = use.ByClass[c], use.ClassPeak[c]
	}
	return v
}
