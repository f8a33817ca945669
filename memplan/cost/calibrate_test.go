package cost

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

func TestFitFindsTheRates(t *testing.T) {
	want := Rate{PerOp: 3e-6, PerFlop: 5e-12, PerByte: 1e-10}
	var s Samples
	for _, size := range []Size{{1e6, 1e4}, {1e7, 1e6}, {1e8, 2e6}, {1e9, 1e7}, {2e9, 3e7}} {
		s.Alone = append(s.Alone, Sample{Class(graph.Linear), size, want.Of(size)})
		s.Core = append(s.Core, Sample{Class(graph.Linear), size, 2 * want.Of(size)})
	}
	for _, n := range []float64{1e4, 1e5, 1e6} { // time falls with size, and flops follow bytes: no negative rate
		s.Alone = append(s.Alone, Sample{Class(graph.Add), Size{n / 4, n}, 1e-5 - n*1e-12})
	}
	s.Disk = []Sample{{CopyClass(graph.Disk, graph.Host), Size{Bytes: 1e6}, 1e-3}}
	c := Fit(2, s)
	got := c.Rates[Class(graph.Linear)]
	require.InEpsilon(t, want.PerOp, got.Alone.PerOp, 1e-3)
	require.InEpsilon(t, want.PerFlop, got.Alone.PerFlop, 1e-3)
	require.InEpsilon(t, want.PerByte, got.Alone.PerByte, 1e-3)
	require.InEpsilon(t, 2*want.PerFlop, got.Core.PerFlop, 1e-3)
	add := c.Rates[Class(graph.Add)].Alone
	require.InEpsilon(t, 1e-5, add.PerOp, 0.1)
	require.Zero(t, add.PerFlop+add.PerByte)
	require.InEpsilon(t, 1e-3, c.Rates[CopyClass(graph.Disk, graph.Host)].Disk.Of(Size{Bytes: 1e6}), 1e-9)

	text, err := json.Marshal(c)
	require.NoError(t, err)
	var back Calibration
	require.NoError(t, json.Unmarshal(text, &back))
	require.Equal(t, *c, back)
}

// shared returns a machine whose ranks share cores, with the given rates.
func shared(cores, ranks int, rates map[Class]Rates) *Machine {
	m := machine()
	m.Cores, m.Sharers, m.Measured = cores, ranks, rates
	return m
}

func always(alone, core, disk float64) Rates {
	return Rates{Alone: Rate{PerOp: alone}, Core: Rate{PerOp: core}, Disk: Rate{PerOp: disk}}
}

// In two's program a copy of 6 core-seconds runs beside an activation of 4, and then a product of 2
// that needs both.
func TestRanksShareCores(t *testing.T) {
	rates := map[Class]Rates{
		CopyClass(graph.Host, graph.Device): always(6, 6, 0),
		Class(graph.Activation):             always(2, 4, 0),
		Class(graph.Linear):                 always(1, 2, 0),
	}
	for _, c := range []struct {
		what         string
		cores, ranks int
		want         float64
	}{
		// The copy has one core, the activation the other: 4 s; the copy ends at 6.
		{"one rank, two cores", 2, 1, 6 + 1},
		// Copy and activation get a third of 1.5 cores each on all four ranks: the cores are busy
		// all the time.
		{"four ranks, two cores", 2, 4, 4 * (6 + 4 + 2) / 2.},
		// An operation gets no more cores than it can use.
		{"one rank, 64 cores", 64, 1, 6 + 1},
		{"two ranks, 64 cores", 64, 2, 6 + 1},
	} {
		r, err := Simulate(two(t, 1), "step", shared(c.cores, c.ranks, rates))
		require.NoError(t, err)
		require.InDelta(t, c.want, r.Seconds, 1e-9, c.what)
	}
}

func TestRanksShareTheDisk(t *testing.T) {
	rates := map[Class]Rates{
		CopyClass(graph.Host, graph.Device): always(3, 0.5, 2), // a copy that needs the disk for 2 s
		Class(graph.Activation):             always(1, 1, 0),
		Class(graph.Linear):                 always(1, 1, 0),
	}
	for ranks, want := range map[int]float64{1: 3 + 1, 2: 4 + 1, 5: 10 + 1} {
		r, err := Simulate(two(t, 1), "step", shared(64, ranks, rates))
		require.NoError(t, err)
		require.InDelta(t, want, r.Seconds, 1e-9, "%d ranks", ranks)
	}
}

func TestTimesBetweenOperations(t *testing.T) {
	rates := map[Class]Rates{
		CopyClass(graph.Host, graph.Device): always(1, 1, 0),
		Class(graph.Activation):             always(1, 1, 0),
		Class(graph.Linear):                 always(1, 1, 0),
	}
	m := shared(64, 1, rates)
	m.Start, m.Gap, m.Handoff, m.Wait.PerOp = 10, 0.5, 0.25, 2
	r, err := Simulate(two(t, 1), "step", m)
	require.NoError(t, err)
	// The copy and the activation run side by side, then the product, which waits for both.
	require.InDelta(t, 10+1.5+(1.5+0.25), r.Seconds, 1e-9)

	c := &Calibration{Threads: 2, Wait: Rate{PerOp: 1.1}, Crowded: Rate{PerOp: 1.5}}
	require.Zero(t, c.Machine(1).Wait, "nobody to wait for")
	require.Equal(t, 1.1, c.Machine(2).Wait.PerOp, "a core each")
	require.Equal(t, 1.5, c.Machine(3).Wait.PerOp)
	require.Equal(t, 3, c.Machine(3).Sharers)
}
