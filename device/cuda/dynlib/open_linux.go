package dynlib

import "github.com/ebitengine/purego"

// noDelete is RTLD_NODELETE of dlfcn.h, which package purego does not name.
const noDelete = 0x1000

func open(path string) (uintptr, error) {
	return purego.Dlopen(path, purego.RTLD_LAZY|purego.RTLD_LOCAL|noDelete)
}

func symbol(h uintptr, name string) (uintptr, error) { return purego.Dlsym(h, name) }

// preload opens a library for those that look for its symbols in the process.
func preload(path string) error {
	_, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_GLOBAL)
	return err
}
