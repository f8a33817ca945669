package planning

import "github.com/spillway-ml/spillway/planner"

// Version is the version of the document that --json writes and --from reads.
const Version = 1

// The names are stable for users of --json.
type (
	// Doc is the document that --json writes and --from reads.
	Doc struct {
		Version   int         `json:"version"`
		Command   []string    `json:"command"` // the request, as arguments
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
		// Explanation lists the recomputed and moved buffers of the requested plan, by names that
		// --recompute and --offload accept.
		Explanation planWhy `json:"explanation"`
		// Recommended is the plan that Run runs; null: nothing fits.
		Recommended *planRecommended `json:"recommended"`
		Answer      *Answer          `json:"answer,omitempty"` // with --ask
		Effort      int              `json:"effort"`           // plans that could be evaluated
		// Run is the command of the verdict; "" if nothing fits.
		Run string `json:"run"`
		// Ways are changes with which a request fits that does not, the cheapest first; Changing
		// are those that change the results. NoWay describes the search if nothing fits.
		Ways     []planWay `json:"ways"`
		Changing []planWay `json:"ways_changing_results"`
		NoWay    string    `json:"no_way,omitempty"`
		// TokensPerSecond, ProcessBytes, Time and Budget belong to the recommended plan, or to the
		// requested one if nothing fits.
		TokensPerSecond Speed `json:"tokens_per_second"`
		ProcessBytes    int64 `json:"process_bytes"`
		// Epilogues names the epilogues of a GPU's 16-bit products that change bits.
		Epilogues string `json:"epilogues,omitempty"`
		// Server is the memory use of all ranks of a server.
		Server Server `json:"server"`
		// Time describes the accuracy of the step_seconds behind tokens_per_second, with --gpu.
		Time *Time `json:"time,omitempty"`
		// Budget is set with --tokens.
		Budget *Budget `json:"budget,omitempty"`
		// Machine holds the data about the machine that made the plan.
		Machine Machine `json:"machine"`
	}
	// Speed is the predicted tokens a second of all ranks, with the range of the prediction.
	// Without --gpu the ends of the range are equal.
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
	// Server is the use of a server's memory by its ranks.
	Server struct {
		Ranks     int64  `json:"ranks"`
		HostBytes int64  `json:"host_bytes"`             // of the requested plan, including memory outside the arenas
		Memory    int64  `json:"memory_bytes,omitempty"` // total, given or typical; left out if neither is known
		Source    string `json:"source,omitempty"`
	}
	// Time: published runs on the GPU took low to high times as long as predicted.
	Time struct {
		Low  float64 `json:"low"`
		High float64 `json:"high"`
		Rows int     `json:"published_runs"`
		Text string  `json:"text"`
		// Stack is the value of --stack. Scale is its calibrated time over step_seconds, within the
		// 80 % interval low to high. Without --stack the range is over all stacks.
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
		// ProcessBytes is the machine's memory that the ranks of a process use, in arenas and
		// outside.
		ProcessBytes int64 `json:"process_bytes"`
		// Batches are the batches of --batch-schedule, the largest first.
		Batches []planBatch `json:"batches,omitempty"`
		// StagingBytes is the part of host.outside_bytes for asynchronous saves; 0: saves are
		// synchronous.
		StagingBytes int64 `json:"staging_bytes,omitempty"`
	}
	// planRole is a stage of a pipeline: its layers, and the memory and time of one of its ranks.
	planRole struct {
		Stage            int     `json:"stage"`
		FirstLayer       int     `json:"first_layer"`
		LastLayer        int     `json:"last_layer"`
		DeviceBytes      int64   `json:"device_bytes"` // the arena's, at its peak
		CommBytesPerStep int64   `json:"comm_bytes_per_step"`
		ComputingSeconds float64 `json:"computing_seconds"`
		WaitingShare     float64 `json:"waiting_share"` // share of the step spent waiting for copies, communication and other stages
	}
	planBatch struct {
		Rows        int     `json:"rows"`
		Accum       int     `json:"accum"`
		StepSeconds float64 `json:"step_seconds"`
	}
	// Space is a rank's use of a memory space, in bytes.
	Space struct {
		CapacityBytes  *int64           `json:"capacity_bytes"` // null: no cap
		PeakBytes      int64            `json:"peak_bytes"`
		PeakAt         string           `json:"peak_at"`
		OutsideBytes   int64            `json:"outside_bytes"`
		ByClass        map[string]int64 `json:"by_class"`
		ClassPeakBytes map[string]int64 `json:"class_peak_bytes"`
	}
)

// Answer is the answer to --ask.
type Answer struct {
	Ask   string `json:"ask"`
	Value any    `json:"value"` // a number, bytes, or a model's name
	Flags string `json:"flags"` // of the plan with the value
	// Plan is the fastest plan found for the value.
	Plan planStage `json:"plan"`
	// Neighbour is the next value, for which no tried plan fits; null: there is none.
	Neighbour *Neighbour `json:"neighbour"`
	first     string
	lines     []string
	given     []string // the value's flag
}

// Neighbour is a value without a plan that fits, and the plan that came nearest.
type Neighbour struct {
	Value any        `json:"value"`
	Plan  *planStage `json:"plan"`
}

// Budget is the predicted time and cost of training on Tokens tokens, at the low and the high end
// of the predicted time's range; without --gpu they are equal.
type Budget struct {
	Tokens    float64    `json:"tokens"`
	Days      [2]float64 `json:"days"`
	RankHours [2]float64 `json:"rank_hours"`     // GPU-hours with --gpu
	Cost      []float64  `json:"cost,omitempty"` // rank hours times --price
}
