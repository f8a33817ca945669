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
	// Machine holds the data about a machine that a plan uses besides its flags. A plan that is
	// read back takes them from the document.
	Machine struct {
		CPU  *CPU       `json:"cpu,omitempty"`          // without --gpu
		GPU  *gpus.GPU  `json:"detected_gpu,omitempty"` // of --gpu detect
		Host float64    `json:"memory_bytes_per_second,omitempty"`
		Disk *DiskSpeed `json:"disk,omitempty"` // of --disk, if doctor measured it
		// Model is the config.json of a model that is a folder.
		Model json.RawMessage `json:"model_config,omitempty"`
	}
	// CPU is a measured CPU.
	CPU struct {
		Threads     int               `json:"threads"`
		Rates       string            `json:"rates"`                 // the source of the rates, in words
		Calibration *cost.Calibration `json:"calibration,omitempty"` // null: typical rates
		Links       []cost.Links      `json:"links,omitempty"`       // measured collectives
	}
	// DiskSpeed is doctor's measurement of a filesystem.
	DiskSpeed struct {
		Block int     `json:"block_bytes"`
		Depth int     `json:"queue_depth"`
		Read  float64 `json:"read_bytes_per_second"`
		Write float64 `json:"write_bytes_per_second"`
	}
)

// Here is the machine that plans, used for plans of its own hardware. It is nil if nothing can be
// measured, as in a browser; such plans are then rejected.
type Here interface {
	// Kept returns the stored calibration of the CPU with a number of threads. The text tells when
	// it was measured, or why it is not used; "" if nothing is stored.
	Kept(threads int) (*cost.Calibration, string)
	// Calibrate measures the CPU and stores the result. The text tells where.
	Calibrate(ctx context.Context, c *config.Config) (*cost.Calibration, string, error)
	// Links returns the stored measurements of collectives over a transport, and a text about the
	// one nearest to ranks.
	Links(transport string, ranks int) ([]cost.Links, string)
	// GPU finds the GPU with the least free memory.
	GPU() (*gpus.GPU, error)
	// MemoryBandwidth returns the stored bandwidth in bytes/s; 0: none.
	MemoryBandwidth() float64
}

// hardware returns the CPU with its ranks over a transport.
func (m *CPU) hardware(transport string) planner.Hardware {
	hw := planner.CPUHardware(m.Threads)
	if m.Calibration != nil {
		hw.Machine = m.Calibration.Machine
	}
	return planner.Over(hw, m.Links, transport)
}

// keepModel stores the config.json of a model that is a folder; presets are known everywhere.
func (m *Machine) keepModel(name string) {
	if _, err := model.LookupPreset(name); err == nil || name == "" {
		return
	}
	shape, err := planner.ModelConfig(name)
	if err != nil {
		return // planning reports the error
	}
	if text, err := model.Marshal(shape, "float32", nil); err == nil {
		m.Model = text
	}
}
