package planning

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/internal/gpus"
)

// The note about a server's memory.
func TestServerNote(t *testing.T) {
	c := spillway.Default()
	c.Model, c.Ranks, c.Offload = "gpt2", 2, "optimizer=host"
	asked, err := spillway.Predict(t.Context(), c, spillway.CPUHardware(1).Machine(2))
	require.NoError(t, err)
	card, err := gpus.Lookup("rtx-4090")
	require.NoError(t, err)
	server := card.Server()
	f := Flags{nodeSize: 2, server: &server}
	require.Contains(t, f.serverNote(asked), "a server of 2 is taken to have 119.21 GiB (a desktop or workstation of 64 GB for each GPU)")
	require.NotContains(t, f.serverNote(asked), "needs more")
	server.Memory = 100e6
	require.Contains(t, f.serverNote(asked), "What was asked for needs more than that")
}
