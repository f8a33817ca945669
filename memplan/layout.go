// Package memplan gives every buffer of a program an offset in its memory
// space's arena, and with it the exact peak of every space.
package memplan

import "github.com/spillway-ml/spillway/graph"

// Layout is where every buffer of a program lies. One Layout serves every rank.
type Layout struct {
	// Offset has the byte offset in its space's arena of each root buffer, by
	// BufID; −1 for views (resolve them with Program.Resolve) and for buffers
	// that neither an operation nor the host (Program.HostBuffers) uses.
	Offset []int64
	// Align is what every offset is a multiple of, in bytes. On disk, and in host
	// memory that disk transfers use, offsets are multiples of DiskPage too.
	Align int64
	// Spaces has what is planned of each memory space.
	Spaces [graph.NumSpaces]SpaceUse
}

// SpaceUse is the plan of one memory space of a rank.
type SpaceUse struct {
	Peak       int64                   // bytes: the arena's extent, the highest offset + size of a buffer
	LowerBound int64                   // bytes: the largest sum of live buffers at any operation; no assignment needs less
	Resident   int64                   // bytes: of buffers that live all the run
	PeakAt     string                  // "section/phase/operation" where live bytes are highest
	ByClass    [graph.NumClasses]int64 // alive at PeakAt, without Buffer.Pad; sums to Peak (pads, holes and alignment are graph.Padding)
	ClassPeak  [graph.NumClasses]int64 // each class's own maximum over the run, of live bytes without Buffer.Pad
	Live       []graph.BufID           // root buffers alive at PeakAt, largest first
}
