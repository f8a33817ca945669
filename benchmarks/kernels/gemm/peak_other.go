//go:build !amd64

package main

func fmaLoop(int) float64 { return 0 }
