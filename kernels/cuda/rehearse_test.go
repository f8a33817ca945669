//go:build linux

package cuda

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
	"github.com/spillway-ml/spillway/internal/testkit/optest"
)

// rehearse runs an operation's rehearsal. It returns the number of launches and of calls of Run
// that the double saw.
func (b *bench) rehearse(t *testing.T, o *optest.Operation) (launches, ran int) {
	b.double(t)
	calls := b.api.(*drivertest.Driver).Calls
	offsets, size := o.Layout(workAlign)
	r := Rehearsal{Program: o.P, Coords: [][]int{make([]int, len(o.P.Mesh))}, Offset: offsets}
	r.Size[graph.Device] = size
	before := calls()
	_, err := b.lib.Rehearse(r, b.stream)
	require.NoError(t, err)
	after := calls()
	return after["cuLaunchKernel"] - before["cuLaunchKernel"], after["run"] - before["run"]
}

// Every kernel checks its predicate before it accesses memory, so a rehearsal launches it at
// invalid addresses. Products run on memory that is freed afterwards.
func TestRehearsalOfEveryKind(t *testing.T) {
	b := newBench(t)
	for _, kind := range optest.Everywhere() {
		for seed := range uint64(4) {
			o := drawn(kind, rand.New(rand.NewPCG(seed, 21)), optest.Options{Target: target(), Half: seed%2 == 1, F16: seed == 3, Aligned: true})
			launches, ran := b.rehearse(t, o)
			require.Positive(t, launches+ran, "%s", kind)
			require.Empty(t, b.api.(*drivertest.Driver).Faults(), "%s, seed %d", kind, seed)
		}
	}
}

// A user-defined kernel may have no predicate, so a rehearsal loads but does not launch it.
func TestRehearsalDoesNotLaunchAProgramsOwn(t *testing.T) {
	b := newBench(t)
	shape := [][]int64{{300}}
	o := optest.OfOwn(boost, boostAttr{1.5}, append(shape, shape...), shape, rand.New(rand.NewPCG(1, 1)), optest.Options{Target: target(), Aligned: true})
	launches, _ := b.rehearse(t, o)
	require.Zero(t, launches)
	require.Positive(t, b.api.(*drivertest.Driver).Calls()["cuModuleGetFunction"])
}

// A rehearsal launches the kernels of sums over ranks as RankSum does, with at most as many threads
// as their blocks allow.
func TestRehearsalOfSums(t *testing.T) {
	b := newBench(t)
	b.double(t)
	o := drawn(graph.Add, rand.New(rand.NewPCG(1, 21)), optest.Options{Target: target(), Aligned: true})
	offsets, size := o.Layout(workAlign)
	r := Rehearsal{Program: o.P, Coords: [][]int{make([]int, len(o.P.Mesh))}, Offset: offsets, Sums: true}
	r.Size[graph.Device] = size
	calls := b.api.(*drivertest.Driver).Calls
	before := calls()["cuLaunchKernel"]
	_, err := b.lib.Rehearse(r, b.stream)
	require.NoError(t, err)
	require.Empty(t, b.api.(*drivertest.Driver).Faults())
	require.Equal(t, 1+5+3, calls()["cuLaunchKernel"]-before, "the operation, sums of five types by a tree, of three in order")
}
