// Package mesh has the passes that divide a program itself over a mesh axis: what a rank
// computes, not only what it stores. tensor.go and pipeline.go have one each. layouts.go decides
// how parameters are cut, slices.go has the buffers and sums of values that are.
package mesh
