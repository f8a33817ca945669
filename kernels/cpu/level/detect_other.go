//go:build !amd64

package level

func detect() (Level, [features]bool) { return Portable, [features]bool{} }
