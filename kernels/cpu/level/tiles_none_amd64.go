//go:build !linux

package level

func permitTiles() bool { return false }
