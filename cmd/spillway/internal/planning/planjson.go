package planning

import (
	"cmp"
	"strings"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/planner"
)

// The contract's names.
type (
	// Doc is what --json writes and --from reads.
	Doc struct {
		Version   int         `json:"version"`
		Command   []string    `json:"command"` // the question, as arguments
		Model     planModel   `json:"model"`
		GPU       string      `json:"gpu"`   // "": the CPU device
		Nodes     int         `json:"nodes"` // servers
		Ranks     int         `json:"ranks"`
		Batch     int         `json:"batch"`
		Accum     int         `json:"accum"`
		Seq       int         `json:"seq"`
		Precision string      `json:"precision"`
		Requested planStage   `json:"requested"`
		Stages    []planStage `json:"stages"`
		Pipeline  []planRole  `json:"pipeline,omitempty"` // the requested plan's stages of --pipeline
		// Explanation says what of the requested plan is made twice or moved, in
		// names that --recompute and --offload take.
		Explanation planWhy          `json:"explanation"`
		Recommended *planRecommended `json:"recommended"`      // null: nothing fits
		Answer      *Answer          `json:"answer,omitempty"` // with --ask
		Effort      int              `json:"effort"`           // plans that could be evaluated
		// Run is the command of the verdict; "" where nothing fits.
		Run string `json:"run"`
		// Ways make fit what does not, the cheapest first, and Changing those that change the results;
		// NoWay says what was tried where none does.
		Ways     []planWay `json:"ways"`
		Changing []planWay `json:"ways_changing_results"`
		NoWay    string    `json:"no_way,omitempty"`
		// TokensPerSecond and ProcessBytes are the recommended plan's; the requested one's where none is
		// recommended.
		TokensPerSecond Speed `json:"tokens_per_second"`
		ProcessBytes    int64 `json:"process_bytes"`
		// Epilogues are those of a GPU's 16-bit products that change bits, by name.
		Epilogues string `json:"epilogues,omitempty"`
		// Server is what the ranks of a server take together.
		Server Server `json:"server"`
		// Time says how the step_seconds behind tokens_per_second is known, with --gpu.
		Time *Time `json:"time,omitempty"`
		// Budget is the recommended plan's, with --tokens; the requested one's where none is recommended.
		Budget *Budget `json:"budget,omitempty"`
		// Machine is what the plan takes from the machine that made it.
		Machine Machine `json:"machine"`
	}
	// Speed is in tokens a second of all ranks, predicted, and the range that the prediction is
	// worth: without --gpu its ends are equal.
	Speed struct {
		Predicted float64 `json:"predicted"`
		Low       float64 `json:"low"`
		High      float64 `json:"high"`
	}
	planWay struct {
		Flags          string    `json:"flags"`
		ChangesResults bool      `json:"changes_results"`
		Costs          string    `json:"costs,omitempty"`
		Slowdown       float64   `json:"slowdown"` // time of a token over the request's
		Note           string    `json:"note,omitempty"`
		Plan           planStage `json:"plan"`
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
		// Stack is that of --stack, Scale its calibrated time over step_seconds, within the 80 %
		// interval low to high; without --stack the range is over all stacks.
		Stack string  `json:"stack,omitempty"`
		Scale float64 `json:"scale,omitempty"`
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
		Flags          string    `json:"flags"`
		ChangesResults bool      `json:"changes_results"`
		Notes          []string  `json:"notes"`
		Plan           planStage `json:"plan"`
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
		TokensPerSecond  Speed   `json:"tokens_per_second"`
		// ProcessBytes is the memory of a process that its ranks take of the machine's, arenas and
		// what is outside them.
		ProcessBytes int64 `json:"process_bytes"`
		// Batches are those of --batch-schedule, the largest first.
		Batches      []planBatch `json:"batches,omitempty"`
		StagingBytes int64       `json:"staging_bytes,omitempty"` // of host.outside_bytes, for saves beside the steps; none: they are synchronous
	}
	// planRole is a stage of a pipeline: its layers, and what a rank of it has and does in a step.
	planRole struct {
		Stage            int     `json:"stage"`
		FirstLayer       int     `json:"first_layer"`
		LastLayer        int     `json:"last_layer"`
		DeviceBytes      int64   `json:"device_bytes"` // the arena's, at its peak
		CommBytesPerStep int64   `json:"comm_bytes_per_step"`
		ComputingSeconds float64 `json:"computing_seconds"`
		WaitingShare     float64 `json:"waiting_share"` // of the step, for copies, communication and other stages
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
func why(f *planner.Forecast) planWhy {
	e := planner.Explain(f)
	w := planWhy{Recompute: cmp.Or(f.Config.Recompute, "none"), Auto: cli.Flagged(f.Auto), Offload: f.Config.Offload, Recomputed: append([]planner.BufferGroup{}, e.Recomputed...), RecomputeSeconds: e.RecomputeSeconds,
		Parked: []planParked{}, Placed: []planPlaced{}, Notes: cli.Reasons(f)}
	for _, g := range e.Parked {
		w.Parked = append(w.Parked, planParked{g, g.Space.String()})
	}
	for _, p := range e.Placed {
		w.Placed = append(w.Placed, planPlaced{p.Class.String(), p.Space.String(), p.Units, p.Of, p.Bytes})
	}
	return w
}

// doc is the report as a document.
func (r *planReport) doc() Doc {
	f, asked, best := r.flags, r.asked, r.best
	c := asked.Config
	doc := Doc{Version: Version, Command: f.question(), Model: planModel{c.Model, asked.Parameters()}, Nodes: f.servers(&c), Ranks: c.Ranks, Batch: c.Batch, Accum: c.Accum, Seq: c.Seq,
		Precision: strings.ToLower(c.PrecisionName()), Requested: f.stageJSON(asked),
		Ways: []planWay{}, Changing: []planWay{}, Machine: f.machine, Effort: f.effort, Answer: f.answer}
	if f.gpuFound != nil {
		doc.GPU = f.gpuFound.Name
	}
	for _, s := range r.stages {
		doc.Stages = append(doc.Stages, f.stageJSON(s))
	}
	doc.Pipeline = r.pipeline()
	n := f.ranksAServer(&c)
	doc.Server = Server{Ranks: n, HostBytes: f.onServer(asked, graph.Host), Memory: f.nodeMemory}
	if f.server != nil {
		doc.Server.Memory, doc.Server.Source = n*f.server.Memory, f.server.Source
	}
	doc.Explanation, doc.Epilogues = why(asked), asked.Epilogues()
	answered := asked
	if best != nil {
		answered = best.Forecast
		doc.Recommended = &planRecommended{cli.FlagText(best.Choices), best.Config.PrecisionName() != c.PrecisionName(), cli.FlaggedAll(best.Reasons), f.stageJSON(answered)}
	}
	if t := f.timeRange(answered); t != nil {
		doc.Time = &Time{t.Low, t.High, t.Rows, t.Text(), f.stack, t.Middle}
	}
	doc.Budget, doc.TokensPerSecond, doc.ProcessBytes = f.budget(answered), f.speedJSON(answered), f.process(answered)
	if a, _ := r.answer(); a != nil {
		doc.Run, _ = f.command(&a.plan.Config, a.changes)
	}
	if f.plans != nil {
		doc.Effort = f.plans.Total()
	}
	for _, list := range r.wayLists() {
		to := &doc.Ways
		if list.changes {
			to = &doc.Changing
		}
		for _, way := range list.ways {
			*to = append(*to, planWay{cli.FlagText(way.Changes), list.changes, way.Cost, way.Slowdown, cli.Flagged(way.Note),
				f.stageJSON(way.Forecast)})
		}
	}
	if r.noWay != nil {
		doc.NoWay = r.nothing()
	}
	return doc
}

func (f *Flags) speedJSON(p *planner.Forecast) Speed {
	s := Speed{Predicted: p.TokensPerSecond()}
	s.Low, s.High = s.Predicted, s.Predicted
	if t := f.timeRange(p); t != nil {
		s.Low, s.High = s.Predicted/t.High, s.Predicted/t.Low
		if t.Middle > 0 {
			s.Predicted /= t.Middle
		}
	}
	return s
}

// process is what the ranks of a process take of the machine's own memory together.
func (f *Flags) process(p *planner.Forecast) int64 {
	ranks, spaces := p.Config.Ranks, []graph.Space{graph.Device, graph.Host}
	if n := p.Config.LocalRanks; n > 0 {
		ranks = min(n, ranks)
	}
	if f.gpuFound != nil {
		spaces = spaces[1:]
	}
	return int64(ranks) * planner.InMemory(p.Plan, spaces)
}

func (f *Flags) stageJSON(p *planner.Forecast) planStage {
	var batches []planBatch
	for _, b := range p.StepTimes() {
		batches = append(batches, planBatch{b.Rows, b.Accum, b.Step.Seconds})
	}
	return planStage{Zero: p.Config.Zero, Batches: batches, Fits: p.Fits, CommBytesPerStep: p.Plan.CommBytes, StepSeconds: p.Step.Seconds, StagingBytes: p.Plan.Config.Staging,
		TokensPerSecond: f.speedJSON(p), ProcessBytes: f.process(p),
		Device: spaceJSON(p, graph.Device), Host: spaceJSON(p, graph.Host), Disk: spaceJSON(p, graph.Disk)}
}

func spaceJSON(f *planner.Forecast, s graph.Space) Space {
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
