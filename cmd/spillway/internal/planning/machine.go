package planning

import (
	"context"
	"encoding/json"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/planner"
)

type (
	// Machine is what a plan takes from the machine that makes it, beside its flags: a plan
	// that is read back takes it from the document.
	Machine struct {
		CPU  *CPU       `json:"cpu,omitempty"`          // without --gpu
		GPU  *gpus.GPU  `json:"detected_gpu,omitempty"` // of --gpu detect
		Host float64    `json:"memory_bytes_per_second,omitempty"`
		Disk *DiskSpeed `json:"disk,omitempty"` // of --disk, where doctor has measured it
		// Model is the config.json of a model that is a folder.
		Model json.RawMessage `json:"model_config,omitempty"`
	}
	// CPU is a CPU as it was measured.
	CPU struct {
		Threads     int               `json:"threads"`
		Rates       string            `json:"rates"`                 // where they are from, for a person
		Calibration *cost.Calibration `json:"calibration,omitempty"` // null: typical rates
		Links       []cost.Links      `json:"links,omitempty"`       // measured collectives
	}
	// DiskSpeed is a filesystem as doctor measured it.
	DiskSpeed struct {
		Block int     `json:"block_bytes"`
		Depth int     `json:"queue_depth"`
		Read  float64 `json:"read_bytes_per_second"`
		Write float64 `json:"write_bytes_per_second"`
	}
)

// Here is the machine that plans, for plans of its own hardware. Where nothing can be measured, as
// in a browser, it is nil, and those are refused.
type Here interface {
	// Kept returns what is kept of the CPU with so many threads, with words for a person that
	// say when it was measured or why it is not used; "" where nothing is kept.
	Kept(threads int) (*cost.Calibration, string)
	// Calibrate measures the CPU and keeps the result. The words say where.
	Calibrate(ctx context.Context, c *config.Config) (*cost.Calibration, string, error)
	// Links returns the kept collectives over a transport, and in words those nearest to ranks.
	Links(transport string, ranks int) ([]cost.Links, string)
	// GPU finds the GPU with the least free memory.
	GPU() (*gpus.GPU, error)
	// MemoryBandwidth is the kept one in bytes/s; 0: none.
	MemoryBandwidth() float64
}

// hardware is the CPU over a transport.
func (m *CPU) hardware(transport string) planner.Hardware {
	hw := planner.CPUHardware(m.Threads)
	if m.Calibration != nil {
		hw.Machine = m.Calibration.Machine
	}
	return planner.Over(hw, m.Links, transport)
}

// keepModel keeps the config.json of a model that is a folder, where there is one; a preset's is
// known everywhere.
func (m *Machine) keepModel(name string) {
	if _, err := model.LookupPreset(name); err == nil || name == "" {
		return
	}
	shape, err := planner.ModelConfig(name)
	if err != nil {
		return // who plans says so
	}
	if text, err := model.Marshal(shape, "float32", nil); err == nil {
		m.Model = text
	}
}
