// Package mesh has the passes that divide the computation of a program over a mesh axis, not only
// its storage. tensor.go and pipeline.go have one pass each. layouts.go decides how parameters are
// cut; slices.go has the buffers and sums of values that are cut.
package mesh
