//go:build unix

package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
)

func TestMain(m *testing.M) { os.Exit(ownworld.Run(m)) }

// A small model's run goes through all stages.
func TestRun(t *testing.T) {
	require.NoError(t, run([]string{"../../testdata/gpt2"}, []string{"2", "3", "0", "1"}, 1, 2, 2))
	require.ErrorContains(t, run([]string{"demo"}, []string{"x"}, 1, 2, 2), `-stages "x"`)
}
