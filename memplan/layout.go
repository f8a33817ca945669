// Package memplan gives every buffer of a program an offset in the arena of its memory space. This
// determines the exact peak of every space.
package memplan

import "github.com/spillway-ml/spillway/graph"

// Layout holds the offsets of all buffers of a program. One Layout serves every rank.
type Layout struct {
	// Offset is the byte offset of each root buffer in its space's arena, by BufID. It is −1 for
	// views (resolve them with Program.Resolve) and for buffers that neither an operation nor the
	// host (Program.HostBuffers) uses.
	Offset []int64
	// Align divides every offset, in bytes. Offsets on disk, and in host memory that disk
	// transfers use, are also multiples of DiskPage.
	Align int64
	// Spaces is the planned use of each memory space.
	Spaces [graph.NumSpaces]SpaceUse
}

// SpaceUse is the plan of one memory space of a rank.
type SpaceUse struct {
	Peak       int64                   // bytes: the arena's extent, the highest offset + size of a buffer
	LowerBound int64                   // bytes: the largest sum of live buffers at any operation; no assignment needs less
	Resident   int64                   // bytes of buffers that live during the complete run
	PeakAt     string                  // "section/phase/operation" where live bytes are highest
	ByClass    [graph.NumClasses]int64 // alive at PeakAt, without Buffer.Pad; sums to Peak (pads, holes and alignment are graph.Padding)
	ClassPeak  [graph.NumClasses]int64 // maximum of each class over the run, of live bytes without Buffer.Pad
	Live       []graph.BufID           // root buffers alive at PeakAt, largest first
}
