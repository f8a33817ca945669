package planner

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
)

// Gemma 2 can be planned for GPUs. Runnable refuses it for cuda with an error that names the model
// type.
func TestGemma2IsNotRunOnGPUs(t *testing.T) {
	c := config.Default()
	c.Model, c.Device = "gemma-2-2b", "cuda"
	require.ErrorContains(t, Runnable(&c), "Config.Device cuda with model_type gemma2")
	c.Model = "gpt2"
	require.NoError(t, Runnable(&c))
	c.Model, c.Device = "gemma-2-2b", "cpu"
	require.NoError(t, Runnable(&c))
}
