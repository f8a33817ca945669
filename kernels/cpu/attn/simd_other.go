//go:build !amd64

package attn

func simdForward[T Float](*Forward[T], int, int, int, int, []T) bool { return false }

func simdBackward[T Float](*Backward[T], int, int, []T) bool { return false }
