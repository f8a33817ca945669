//go:build !linux

package store

import "path/filepath"

// FilesystemOf names the filesystem of a folder: here, its volume.
func FilesystemOf(dir string) string {
	p, err := filepath.Abs(dir)
	if err != nil {
		return dir
	}
	return filepath.VolumeName(p) + "/"
}
