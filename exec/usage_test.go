package exec_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/exec"
)

func TestUsageCountsCollectives(t *testing.T) {
	const w = 2
	z := newZero3(w, 40)
	j := newRanks(t, z.builder, jobOptions{meter: true})
	z.load(j, z.init(rand.New(rand.NewPCG(1, 1))))
	var want exec.Usage
	for _, ph := range z.p.Sections[0].Phases {
		for _, op := range ph.Ops {
			for i, k := range exec.CollectiveKinds {
				if op.Kind != k {
					continue
				}
				c, whole := &want.Collectives[i], int64(0)
				for _, b := range op.In {
					whole = max(whole, z.p.Buf(b).Bytes())
				}
				for _, b := range op.Out {
					whole = max(whole, z.p.Buf(b.Buf).Bytes())
				}
				c.Calls += int64(ph.Repeat)
				c.Bytes += int64(ph.Repeat) * whole
			}
		}
	}
	require.NotZero(t, want.Collectives[0].Calls)
	var before [w]exec.Usage
	for step := range 2 {
		j.all(func(r int, e *exec.Executor) error { _, err := z.step(e, step, r); return err })
		for r, e := range j.ex {
			u := e.Usage().Sub(before[r])
			before[r] = e.Usage()
			require.Positive(t, u.Busy)
			require.GreaterOrEqual(t, u.Busy, u.Overlapped)
			for i := range u.Collectives {
				u.Busy -= u.Collectives[i].Time
				u.Collectives[i].Time = 0
			}
			require.Zero(t, u.Busy)
			require.Equal(t, want.Collectives, u.Collectives)
		}
	}
	require.Equal(t, before[0].Collectives[0].Calls*2, before[0].Add(before[1]).Collectives[0].Calls)
}
