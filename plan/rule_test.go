package plan

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/zero"
)

// A user-defined update rule can be planned at every stage, on the device and chunk by chunk on the
// host, without changes to the passes.
func TestARuleOfOnesOwn(t *testing.T) {
	plain := zero.Rule{Name: "plain", States: []string{"velocity"}, Source: "this test", Emit: func(e *zero.Emitter, u *zero.Target) {
		e.Apply(u, zero.Operation("sgd"), "plain", e.Scalars(u), zero.InPlace(u.Value, u.States[0]), e.Attr(u))
	}}
	fwd := forwardOf(t, smallGPT, 2, 16, false)
	for stage := range zero.Stage(4) {
		for _, where := range []string{"", "optimizer=host"} {
			c := Config{Ranks: 2, Stage: stage, Accum: 1, Prefetch: 1, Clip: 1, Optimizer: zero.Optimizer{Rule: &plain, Beta1: 0.9}, Target: graph.CPUTarget(), Verify: true}
			var err error
			c.Offload, err = offload.Parse(where)
			require.NoError(t, err)
			c.Offload.Chunk = 1024
			p, err := Build(fwd, c)
			require.NoError(t, err)
			updates := 0
			for i := range p.Program.Sections {
				for _, ph := range p.Program.Sections[i].Phases {
					for k := range ph.Ops {
						if ph.Ops[k].Own == zero.Operation("sgd") {
							require.Equal(t, where != "", ph.Ops[k].Stream == graph.HostWork)
							updates++
						}
					}
				}
			}
			require.Greater(t, updates, 2)
			require.True(t, slices.ContainsFunc(p.Program.Units, func(u graph.Unit) bool { return len(u.States) == 1 && u.States[0].Name == "velocity" }))
		}
	}
}
