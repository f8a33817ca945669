// Package mesh has the passes that divide a program itself over a mesh axis: what a rank
// computes, not only what it stores.
package mesh
