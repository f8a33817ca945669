package cpu

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	devcpu "github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/kernels/optest"
)

// TestRefuses16Bits: operations that the kind table allows in 16 bits and that
// have no such kernel here are refused by name, whatever their lengths.
func TestRefuses16Bits(t *testing.T) {
	pl := pool.New(1)
	defer pl.Close()
	refused := 0
	for _, kind := range optest.Kinds() {
		for seed := range uint64(4) {
			o := newOperation(kind, rand.New(rand.NewPCG(seed, 5)))
			op := o.Op()
			info, _ := graph.InfoOf(kind)
			ins, outs := info.Operands(op.Attr)
			changed := false
			half := func(d graph.Operand, id graph.BufID) {
				if id != graph.NoBuf && d.Float != graph.AnyFloat {
					o.P.Buf(id).DType = graph.BF16
					changed = true
				}
			}
			for i, id := range op.In {
				half(ins[i], id)
			}
			for i, q := range op.Out {
				half(outs[i], q.Buf)
			}
			if !changed {
				continue
			}
			require.NoError(t, graph.Check(o.P, op), "%s", kind)
			ctx := devcpu.New(0, devcpu.Options{})
			offsets, size := o.Layout(workAlign)
			arena, err := ctx.Alloc(graph.Device, size)
			require.NoError(t, err)
			_, err = New(pl).Bind(o.Binding(arena, offsets))
			require.ErrorContains(t, err, "is bf16; the CPU's kernel takes f32", "%s", kind)
			require.ErrorContains(t, err, "cpu: bind op ("+string(kind)+")")
			require.NoError(t, ctx.Close())
			refused++
		}
	}
	require.Greater(t, refused, 100)
}
