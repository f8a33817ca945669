package cuda

import (
	"cmp"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
)

const norm = "norm.cu"

// normHeld is the largest number of 16-byte packs of a row that a thread keeps in
// registers: HELD of norm.cu.
const normHeld = 8

// normThreads returns the block size for a row: the fewest warps that hold it in registers.
// It depends on the row's width and type only, because the block size decides the order of the
// sums. Rows too wide for a block are an error.
func (b *binding) normThreads(t graph.DType, cols int64) int64 {
	const most = 512
	pack := int64(16 / t.Size())
	if cols > most*normHeld*pack {
		b.failf("a norm over %d columns of %v; the kernel takes %d at most", cols, t, most*normHeld*pack)
		return 32
	}
	return roundUp((cols+normHeld*pack-1)/(normHeld*pack), 32)
}

// norm adds the launch of a norm's kernel. args already holds the addresses of the operands.
func (b *binding) norm(kernel string, args *driver.Args) {
	n, c := matrix(b.outBuf(0))
	b.rows(norm, kernel+b.float(b.outBuf(0)), n, b.normThreads(b.outBuf(0).DType, c), 0,
		args.Int32(int32(c)).Float32(float32(attr[graph.NormAttr](b).Eps)))
}

var _ kernels.Joiner = (*Library)(nil)

// Join implements kernels.Joiner: it fuses a sum and the norm of the sum into one kernel,
// which reads each addend once and does not reread the sum.
//
//	s = a + b;  y, mean, rstd = layernorm(s)
//
// The block of a row writes y after it has read its row of a and b, but other blocks may still read
// their rows. So y may have exactly the address of a or b, and must not overlap them otherwise.
func (l *Library) Join(first, second kernels.Binding) (device.Kernel, error) {
	name := map[graph.Kind]string{graph.LayerNorm: "add_layernorm_", graph.RMSNorm: "add_rmsnorm_"}[second.Op.Kind]
	if first.Op.Kind != graph.Add || name == "" || first.Op.Out[0].Mode == graph.Accum || !joins(&first, &second) {
		return nil, nil
	}
	b := &binding{Binding: second, lib: l, kernel: &kernel{}}
	added := &binding{Binding: first, lib: l, kernel: b.kernel}
	b.norm(name, b.operandsFrom(1, b.args().Pointer(added.in(0)).Pointer(added.in(1)).Pointer(added.out(0))))
	if err := cmp.Or(b.err, added.err); err != nil {
		return nil, err
	}
	var touches []device.Ptr
	for _, part := range []*kernels.Binding{&first, &second} {
		list, err := part.Places()
		if err != nil {
			b.failf("%w", err)
			return nil, b.err
		}
		touches = append(touches, list...)
	}
	b.kernel.operands = of(&second, touches)
	b.kernel.reads = append(b.kernel.reads, first.In...)
	b.kernel.writes = append(b.kernel.writes, first.Out...)
	return b.kernel, nil
}

// joins says whether the norm's input is exactly the sum's output, all operands are in
// device memory, and their addresses allow a fused kernel.
func joins(sum, norm *kernels.Binding) bool {
	x := norm.In[0]
	if x != sum.Out[0] || norm.Program.Buf(norm.Op.In[0]).DType != sum.Program.Buf(sum.Op.Out[0].Buf).DType {
		return false
	}
	for _, p := range append(append(append([]device.Ptr(nil), sum.In...), norm.In...), norm.Out...) {
		if p.Arena == nil || p.Arena.Space() != graph.Device {
			return false
		}
	}
	for _, in := range sum.In {
		for i, out := range norm.Out {
			if in.Overlaps(out) && (i > 0 || in != out) {
				return false
			}
		}
	}
	for _, in := range norm.In[1:] { // read after the sum is written
		if in.Overlaps(sum.Out[0]) {
			return false
		}
	}
	return true
}

// normGrad adds the launches of the gradient of a layer norm, or of an RMS norm if mean is
// 0. The first kernel writes dx, and into the workspace one partial sum per lane of rows of
// the gradients of gain and shift. A second kernel adds the partial sums.
func (b *binding) normGrad(mean, rstd, dbeta driver.Address, accumBeta int32) {
	x := b.inBuf(1)
	n, c := matrix(x)
	name, kept, most := "norm_grad_", int64(8), int64(512) // columns a thread, most threads: as in norm.cu
	if c > kept*most {
		name, kept, most = "norm_grad_wide_", 16, 1024
	}
	if c > kept*most {
		b.failf("the gradient of a norm over %d columns; the kernel takes %d at most", c, kept*most)
		return
	}
	var gains, shifts, dx driver.Address
	if b.hasOut(1) || b.hasOut(2) {
		gains = b.work(2 * 4 * cut.NormLanes * c)
		shifts = gains + driver.Address(4*cut.NormLanes*c)
	}
	given := func(sums, y driver.Address) driver.Address {
		if y == 0 {
			return 0
		}
		return sums
	}
	accumulate := int32(0)
	if b.hasOut(0) {
		dx, accumulate = b.out(0), b.accum(0)
	}
	b.rows(norm, name+b.float(x), cut.NormLanes, roundUp((c+kept-1)/kept, 32), 0,
		b.args().Pointer(b.in(0)).Pointer(b.in(1)).Pointer(b.in(2)).Pointer(mean).Pointer(rstd).Pointer(dx).
			Pointer(given(gains, b.out(1))).Pointer(given(shifts, dbeta)).Int64(n).Int32(int32(c)).Int32(accumulate))
	add := func(t graph.DType, dgamma, dbeta driver.Address) {
		b.launch(norm, "norm_lanes_"+suffix[t], driver.Dim{X: uint32((c + 31) / 32), Y: 2, Z: 1}, driver.Dim{X: 32, Y: 16, Z: 1}, 0,
			b.args().Pointer(gains).Pointer(shifts).Pointer(dgamma).Pointer(dbeta).Int64(c).Int32(b.accum(1)).Int32(accumBeta))
	}
	switch {
	case gains == 0:
	case !b.hasOut(1):
		add(b.outBuf(2).DType, 0, dbeta)
	case !b.hasOut(2) || b.outBuf(1).DType == b.outBuf(2).DType:
		add(b.outBuf(1).DType, b.out(1), dbeta)
	default: // one kernel writes gradients of one type only
		add(b.outBuf(1).DType, b.out(1), 0)
		add(b.outBuf(2).DType, 0, dbeta)
	}
}
