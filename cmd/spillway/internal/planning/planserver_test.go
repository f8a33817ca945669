package planning

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/internal/gpus"
)

func TestRoughNumbers(t *testing.T) {
	for v, want := range map[float64]string{1.389: "1.4 s", 0.0469: "47 ms", 0.00469: "4.7 ms", 47.2: "47 s", 0.00002: "20 µs", 9.99: "10 s", 130: "2 min", 3700: "62 min"} {
		require.Equal(t, want, roughSeconds(v))
	}
	require.Equal(t, "1.4–2.6 s", between("1.4 s", "2.6 s"))
	require.Equal(t, "950 ms–1.2 s", between("950 ms", "1.2 s"))
	require.Equal(t, "3 s", between("3 s", "3 s"))
	require.Zero(t, rough(0))
}

// What is said of a server's memory beside a plan.
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
