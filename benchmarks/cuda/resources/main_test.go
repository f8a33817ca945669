package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// As NVRTC 11.8 prints it.
const sample = `ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_80'
ptxas info    : Function properties for one
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, 384 bytes cmem[0]
ptxas info    : Compiling entry function 'two' for 'sm_80'
ptxas info    : Function properties for two
ptxas         .     48 bytes stack frame, 44 bytes spill stores, 52 bytes spill loads
ptxas info    : Used 255 registers, 2048 bytes smem, 384 bytes cmem[0]
`

func TestParse(t *testing.T) {
	got := map[string]use{}
	parse(sample, got)
	require.Equal(t, map[string]use{
		"one": {registers: 16},
		"two": {registers: 255, stack: 48, spills: 96, shared: 2048},
	}, got)
}
