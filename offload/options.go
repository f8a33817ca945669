package offload

import (
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// Options say where each class of buffers rests; graph.Device, the zero value,
// leaves it where it is.
type Options struct {
	Optimizer, Parameters, Gradients, Activations graph.Space

	// Ahead is how many regions of use before its own a fetch may start, and how
	// many later ones may start before what was written is stored away. 0: copies
	// and computation take turns, with the least memory.
	Ahead int
	// Chunk is the most elements of a unit that an update on the host, or a
	// transfer through the host from or to disk, works on at a time: it bounds the
	// host memory of units of any size. A multiple of 1024; 0: DefaultChunk.
	Chunk int64
	// DeviceShare is the part of the optimizer states, by bytes, that stays on the
	// device: whole units, from the last one of the program backward, as long as
	// they fit the share. Their updates run there.
	DeviceShare float64
}

// DefaultChunk is 16 MiB of float32.
const DefaultChunk = 4 << 20

func (o Options) chunk() int64 {
	if o.Chunk == 0 {
		return DefaultChunk
	}
	return o.Chunk
}

// Active says whether anything is offloaded.
func (o Options) Active() bool {
	return o.Optimizer != graph.Device || o.Parameters != graph.Device || o.Gradients != graph.Device || o.Activations != graph.Device
}

// UsesDisk says whether anything rests on disk.
func (o Options) UsesDisk() bool {
	return o.Optimizer == graph.Disk || o.Parameters == graph.Disk || o.Gradients == graph.Disk || o.Activations == graph.Disk
}

// Validate refuses options out of range.
func (o Options) Validate() error {
	for _, s := range []graph.Space{o.Optimizer, o.Parameters, o.Gradients, o.Activations} {
		if s >= graph.NumSpaces {
			return fmt.Errorf("offload: %v is not a memory space", s)
		}
	}
	switch {
	case o.Ahead < 0:
		return fmt.Errorf("offload: %d regions ahead; 0 or more are needed", o.Ahead)
	case o.Chunk < 0 || o.Chunk%1024 != 0:
		return fmt.Errorf("offload: chunks of %d elements; a multiple of 1024 is needed", o.Chunk)
	case !(o.DeviceShare >= 0 && o.DeviceShare <= 1):
		return fmt.Errorf("offload: a share of %g of the optimizer states on the device; a number from 0 to 1 is needed", o.DeviceShare)
	}
	return nil
}

// Parse reads "optimizer=host|disk,parameters=…,gradients=…,activations=…", any
// of them in any order. "" and "none" offload nothing. Where a class is given
// twice, the last counts.
func Parse(s string) (Options, error) {
	var o Options
	if s == "" || strings.EqualFold(s, "none") {
		return o, nil
	}
	for _, part := range strings.Split(s, ",") {
		name, where, ok := strings.Cut(strings.TrimSpace(part), "=")
		if !ok {
			return o, fmt.Errorf("%q: write CLASS=host or CLASS=disk", part)
		}
		var space graph.Space
		switch strings.ToLower(where) {
		case "host":
			space = graph.Host
		case "disk":
			space = graph.Disk
		default:
			return o, fmt.Errorf("%q: %q is not a place; use host or disk", part, where)
		}
		switch strings.ToLower(name) {
		case "optimizer":
			o.Optimizer = space
		case "parameters":
			o.Parameters = space
		case "gradients":
			o.Gradients = space
		case "activations":
			o.Activations = space
		default:
			return o, fmt.Errorf("%q: class %q is not known; use optimizer, parameters, gradients or activations", part, name)
		}
	}
	return o, nil
}
