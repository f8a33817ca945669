package filesys

import (
	"cmp"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// mounted is a file system over a folder and all below it.
type mounted struct {
	dir string // absolute and clean
	fs  FS
}

var (
	mounts   atomic.Pointer[[]mounted] // innermost first, of one folder the last; nil outside of tests
	mounting sync.Mutex
)

// Mount puts a file system over a folder, of which dir need not be one of the
// system's, for this process until unmount. It is for tests: no other code calls it.
func Mount(dir string, over FS) (unmount func()) {
	m := mounted{absolute(dir), over}
	change(func(list []mounted) []mounted {
		list = append([]mounted{m}, list...)
		slices.SortStableFunc(list, func(a, b mounted) int { return cmp.Compare(len(b.dir), len(a.dir)) })
		return list
	})
	return func() {
		change(func(list []mounted) []mounted {
			return slices.DeleteFunc(list, func(other mounted) bool { return other == m })
		})
	}
}

func change(edit func([]mounted) []mounted) {
	mounting.Lock()
	defer mounting.Unlock()
	var list []mounted
	if old := mounts.Load(); old != nil {
		list = slices.Clone(*old)
	}
	if list = edit(list); len(list) == 0 {
		mounts.Store(nil)
		return
	}
	mounts.Store(&list)
}

// at is the file system that a path lies on.
func at(path string) FS {
	list := mounts.Load()
	if list == nil {
		return OS
	}
	path = absolute(path)
	for _, m := range *list {
		if within(m.dir, path) {
			return m.fs
		}
	}
	return OS
}

// within tells whether a path is dir or below it.
func within(dir, path string) bool {
	rest, ok := strings.CutPrefix(path, dir)
	return ok && (rest == "" || rest[0] == filepath.Separator || strings.HasSuffix(dir, string(filepath.Separator)))
}

func absolute(path string) string {
	abs, err := filepath.Abs(path)
	if err != nil { // there is no working folder
		return filepath.Clean(path)
	}
	return abs
}
