package planning

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/internal/regular"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/planner"
)

// Version is that of the document which --json writes and --from reads.
const Version = 1

// maxDocument bounds what is read of a plan's document, in bytes; they are some 100 KB.
const maxDocument = 64 << 20

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

// readFrom sets every flag of a plan's document that the command line has not set, and takes
// its machine in place of this one.
func (f *Flags) readFrom(fs *pflag.FlagSet, path string) error {
	switch {
	case fs.Changed("config"):
		return fmt.Errorf("--from %.80s with --config: each gives the flags of a plan; leave one out", path)
	case fs.Changed("calibrate"):
		return fmt.Errorf("--from %.80s with --calibrate: the file has the measurements of the machine that it was made on; leave one out", path)
	}
	text, err := regular.ReadFile(path, maxDocument)
	if err != nil {
		return fmt.Errorf("--from: %w", err)
	}
	var doc struct {
		Version *int     `json:"version"`
		Command []string `json:"command"`
		Machine *Machine `json:"machine"`
	}
	const remedy = "give a file that spillway plan --json has written"
	if err := json.Unmarshal(text, &doc); err != nil {
		return fmt.Errorf("--from %.80s: not a plan's JSON (%w); %s", path, err, remedy)
	}
	switch {
	case doc.Version == nil:
		return fmt.Errorf("--from %.80s: it has no version, so it is no plan's JSON or one of an older spillway; %s", path, remedy)
	case *doc.Version != Version:
		return fmt.Errorf("--from %.80s: version %d is not known, only %d; read it with the spillway that wrote it, or plan again", path, *doc.Version, Version)
	case len(doc.Command) == 0 || doc.Command[0] != "plan" || doc.Machine == nil:
		return fmt.Errorf("--from %.80s: its command or machine is missing; %s", path, remedy)
	}
	given := map[string]bool{}
	fs.Visit(func(flag *pflag.Flag) { given[flag.Name] = true })
	if err := setAll(fs, doc.Command[1:], given); err != nil {
		return fmt.Errorf("--from %.80s: %w; %s", path, err, remedy)
	}
	f.machine, f.read, f.diskHere = *doc.Machine, true, given["disk"]
	if given["model"] {
		f.machine.Model = nil
	}
	if given["disk"] {
		f.machine.Disk = nil
	}
	if given["gpu"] {
		f.machine.GPU = nil
	}
	if given["gpu"] || given["threads"] {
		f.machine.CPU = nil
	}
	return nil
}

// setAll sets flags as words of a command line, but for those that are given.
func setAll(fs *pflag.FlagSet, words []string, given map[string]bool) error {
	for i := 0; i < len(words); i++ {
		name, value, joined := strings.Cut(strings.TrimPrefix(words[i], "--"), "=")
		flag := fs.Lookup(name)
		if flag == nil || !strings.HasPrefix(words[i], "--") || outputs[name] || name == "from" || name == "config" {
			return fmt.Errorf("%.80q is no flag of a plan's command", words[i])
		}
		switch {
		case joined:
		case flag.NoOptDefVal != "":
			value = flag.NoOptDefVal
		case i+1 == len(words):
			return fmt.Errorf("%.80q has no value", words[i])
		default:
			i++
			value = words[i]
		}
		if given[name] {
			continue
		}
		if err := fs.Set(name, value); err != nil {
			return cli.PlainFlagError(err)
		}
	}
	return nil
}

// lookAround takes what the plan needs of this machine, unless a document has said it.
func (f *Flags) lookAround(ctx context.Context, fs *pflag.FlagSet, c *config.Config, stderr io.Writer) error {
	m := &f.machine
	switch {
	case f.gpuFound != nil && f.calibrate:
		return errors.New("--calibrate measures this machine's CPU, and --gpu plans for a GPU; leave one of them out")
	case f.gpuFound != nil && fs.Changed("transport"):
		return errors.New("--transport is how CPU ranks meet; leave it out with --gpu")
	}
	if !f.read || f.diskHere {
		options.TuneDisk(c, stderr)
		if c.DiskTuning.Block > 0 {
			m.Disk = cmp.Or(m.Disk, &DiskSpeed{})
			m.Disk.Block, m.Disk.Depth = c.DiskTuning.Block, c.DiskTuning.Depth
		}
	} else if m.Disk != nil {
		c.DiskTuning.Block, c.DiskTuning.Depth = m.Disk.Block, m.Disk.Depth
	}
	if m.Model == nil {
		m.keepModel(c.Model)
	} else {
		shape, err := model.Parse(m.Model)
		if err != nil {
			return fmt.Errorf("--from: its model_config: %w", err)
		}
		f.opened = planner.ModelOf(c.Model, shape)
	}
	if f.gpuFound != nil {
		m.CPU = nil
		return nil
	}
	if m.CPU == nil {
		if f.here == nil && !fs.Changed("threads") {
			return errors.New("--gpu is missing, and a browser does not tell what it runs on; give --gpu NAME (plan --list-gpus), or --threads N for a CPU of typical cores")
		}
		if err := checkLinks(f.transport); err != nil {
			return err
		}
		threads := c.ComputeThreads()
		cal, rates, err := f.cpuRates(ctx, c)
		if err != nil {
			return err
		}
		links, note := measuredLinks(f.here, strings.ToLower(f.transport), c.Ranks)
		if note != "" {
			rates += "; " + note
		}
		m.CPU = &CPU{threads, rates, cal, links}
	}
	c.Threads = m.CPU.Threads
	f.CPU, f.Rates = m.CPU.hardware(strings.ToLower(f.transport)), m.CPU.Rates
	return nil
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
