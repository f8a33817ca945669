// Package dl opens shared libraries at run time and calls their functions. A build with the tag
// "static" opens none, so it needs no dynamic loader and no other file on the machine.
package dl

// Modes of Open, as in dlfcn.h.
const (
	Lazy     = 0x1
	Now      = 0x2
	Local    = 0
	Global   = 0x100
	NoDelete = 0x1000 // the library stays loaded after Close
)
