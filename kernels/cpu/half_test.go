package cpu

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device"
	devcpu "github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// TestRefuses16Bits: operations that the kind table allows in 16 bits and that
// have no such kernel here are refused by name, whatever their lengths.
func TestRefuses16Bits(t *testing.T) {
	pl := pool.New(1)
	defer pl.Close()
	refused := 0
	for kind := range shapes {
		for seed := range uint64(4) {
			o := newOperation(kind, rand.New(rand.NewPCG(seed, 5)))
			op := o.op()
			info, _ := graph.InfoOf(kind)
			ins, outs := info.Operands(op.Attr)
			changed := false
			half := func(d graph.Operand, id graph.BufID) {
				if id != graph.NoBuf && d.Float != graph.AnyFloat {
					o.p.Buf(id).DType = graph.BF16
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
			require.NoError(t, graph.Check(o.p, op), "%s", kind)
			ctx := devcpu.New(0, devcpu.Options{})
			size := int64(0)
			at := map[graph.BufID]int64{}
			for id := range o.p.Buffers {
				at[graph.BufID(id)] = size
				size += aligned(o.p.Buffers[id].Bytes())
			}
			arena, err := ctx.Alloc(graph.Device, size)
			require.NoError(t, err)
			ptr := func(id graph.BufID) device.Ptr {
				if id == graph.NoBuf {
					return device.Ptr{}
				}
				return device.Ptr{Arena: arena, Off: at[id], Len: o.p.Buf(id).Bytes()}
			}
			b := kernels.Binding{Program: o.p, Op: op, Work: ptr(op.Work), Skip: ptr(op.Skip)}
			if o.p.Mesh != nil {
				b.Coord = []int{o.rank}
			}
			for _, id := range op.In {
				b.In = append(b.In, ptr(id))
			}
			for _, q := range op.Out {
				b.Out = append(b.Out, ptr(q.Buf))
			}
			_, err = New(pl).Bind(b)
			require.ErrorContains(t, err, "is bf16; the CPU's kernel takes f32", "%s", kind)
			require.ErrorContains(t, err, "cpu: bind op ("+string(kind)+")")
			require.NoError(t, ctx.Close())
			refused++
		}
	}
	require.Greater(t, refused, 100)
}
