package cost

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

// FitLinks finds the rates from which the samples were made. A machine with these links uses them
// for its collectives, and differs in nothing else.
func TestLinks(t *testing.T) {
	const gather, reduce = Class(graph.AllGather), Class(graph.AllReduce)
	want := map[Class]Rate{gather: {PerOp: 30e-6, PerByte: 2e-9}, reduce: {PerOp: 80e-6, PerByte: 3e-9}}
	var samples []Sample
	for class, r := range want {
		for bytes := 1024.0; bytes < 1e9; bytes *= 4 {
			samples = append(samples, Sample{class, Size{Bytes: bytes}, r.Of(Size{Bytes: bytes})})
		}
	}
	l := FitLinks("mpi", 4, samples)
	require.Len(t, l.Rates, 2)
	for class, r := range want {
		require.InEpsilon(t, r.PerOp, l.Rates[class].PerOp, 1e-6)
		require.InEpsilon(t, r.PerByte, l.Rates[class].PerByte, 1e-6)
	}
	m := CPU(2, 4)
	m.Measured = map[Class]Rates{gather: {Alone: Rate{PerOp: 1}}, "linear": {Alone: Rate{PerOp: 2}}}
	on := l.On(m)
	require.Equal(t, Rates{l.Rates[gather], l.Rates[gather], Rate{}}, on.Measured[gather])
	require.Equal(t, m.Measured["linear"], on.Measured["linear"])
	require.Equal(t, Rate{PerOp: 1}, m.Measured[gather].Alone, "the machine itself stays")
	require.Equal(t, m.Vector, on.Vector)

	list := []Links{{Transport: "shm", Ranks: 2}, {Transport: "mpi", Ranks: 2}, {Transport: "mpi", Ranks: 16}, {Transport: "mpi", Ranks: 1}}
	for ranks, at := range map[int]int{1: 2, 2: 2, 4: 2, 8: 16, 100: 16} {
		require.Equal(t, at, NearestLinks(list, "mpi", ranks).Ranks, "%d ranks", ranks)
	}
	require.Nil(t, NearestLinks(list, "inproc", 2))
}
