package search

import "github.com/spillway-ml/spillway/precision"

// Field is the field of a configuration that a Change changes.
type Field int

// Fields, in the order in which changes are listed.
const (
	Device     Field = iota // name of another device
	Nodes                   // servers, of GPUsPerNode ranks each
	PerNode                 // ranks of a server
	Ranks                   // world size
	ShardSize               // ranks that share the states
	Stage                   // of ZeRO
	Batch                   // rows of a micro-batch
	Accum                   // micro-batches a step
	LayerOrder              // the order of micro-batches
	Seq                     // tokens of a row
	Precision               // of values
	Prefetch                // units gathered ahead
	Recompute               // recomputation
	Disk                    // a disk tier
	Offload                 // offloaded buffers
	HostMemory              // bytes of a rank's host memory
	Other                   // a field of the job that a Variant changes
)

// Change is a new value of one field of a configuration. Only the members that this field uses are
// set.
type Change struct {
	Field  Field
	Number int    // of the fields that count
	Bytes  int64  // of HostMemory
	On     bool   // of LayerOrder and Disk; of Recompute: it is Spec.Auto
	Text   string // of Device, its name; of Other, what it is to a Variant's maker; of Recompute and Offload, their options as package recompute and offload write them
	// Precision is that field's value.
	Precision precision.Precision
}

// changes returns the changes that turn one configuration into another. device is the name of
// another device.
func changes(from, to *Spec, nodeSize int, device string) (list []Change) {
	add := func(changed bool, c ...Change) {
		if changed {
			list = append(list, c...)
		}
	}
	number := func(f Field, a, b int) { add(a != b, Change{Field: f, Number: b}) }
	add(device != "", Change{Field: Device, Text: device})
	if to.Ranks != from.Ranks && nodeSize > 0 && to.Ranks%nodeSize == 0 {
		add(true, Change{Field: Nodes, Number: to.Ranks / nodeSize}, Change{Field: PerNode, Number: nodeSize})
	} else {
		number(Ranks, from.Ranks, to.Ranks)
	}
	number(ShardSize, from.ShardSize, to.ShardSize)
	number(Stage, from.Stage, to.Stage)
	add(from.Batch != to.Batch || from.Accum != to.Accum, Change{Field: Batch, Number: to.Batch}, Change{Field: Accum, Number: to.Accum})
	add(to.Accum > 1 && from.LayerOrder != to.inLayers(), Change{Field: LayerOrder, On: to.inLayers()})
	number(Seq, from.Seq, to.Seq)
	add(from.Precision != to.Precision, Change{Field: Precision, Precision: to.Precision})
	number(Prefetch, from.Prefetch, to.Prefetch)
	again := recomputeChange(to)
	add(again != recomputeChange(from), again)
	add(from.Disk != to.Disk, Change{Field: Disk, On: to.Disk})
	away := to.Offload.String()
	add(away != from.Offload.String(), Change{Field: Offload, Text: away})
	add(to.moreHost > 0, Change{Field: HostMemory, Bytes: to.moreHost})
	if to.variant != from.variant {
		list = append(list, to.variant.Changes...)
	}
	return list
}

func recomputeChange(s *Spec) Change {
	if s.Auto {
		return Change{Field: Recompute, On: true}
	}
	return Change{Field: Recompute, Text: s.Recompute.String()}
}
