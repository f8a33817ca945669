package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWaitingForTheDisk(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace.json")
	require.NoError(t, os.WriteFile(path, []byte(`{"traceEvents":[
		{"ph":"X","tid":0,"ts":0,"dur":1000000,"args":{"section":"step"}},
		{"ph":"X","tid":0,"ts":3000000,"dur":1000000,"args":{"section":"step"}},
		{"ph":"X","tid":0,"ts":9000000,"dur":1000000,"args":{"section":"init"}}
	]}`), 0o600))
	got, err := waiting(path)
	require.NoError(t, err)
	require.Zero(t, got, "no disk")
	require.Equal(t, 4.0, length([]span{{0, 2}, {1, 3}, {5, 6}}))
	require.Equal(t, 3.0, length([]span{{0, 3}, {1, 2}}))
}

// A small run prints its pairs, and the orders leave the same parameters.
func TestRun(t *testing.T) {
	require.NoError(t, run(1, 1, filepath.Join(t.TempDir(), "disk"), 1, 2, 8))
}
