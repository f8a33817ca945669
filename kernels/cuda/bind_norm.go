package cuda

import (
	"cmp"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
)

func init() {
	register(map[graph.Kind]binder{
		graph.LayerNorm:     bindLayerNorm,
		graph.LayerNormGrad: func(b *binding) { b.normGrad(b.in(3), b.in(4), b.out(2), b.accum(2)) },
		graph.RMSNorm:       bindRMSNorm,
		graph.RMSNormGrad:   func(b *binding) { b.normGrad(0, b.in(3), 0, 0) },
	})
}

const norm = "norm.cu"

// normThreads is the block of a row: by its width alone, on which the sums'
// order rests.
func normThreads(cols int64) int64 {
	switch {
	case cols <= 128:
		return 32
	case cols <= 1024:
		return 128
	case cols <= 4096:
		return 256
	}
	return 512
}

// normKept is the dynamic shared memory of a block that keeps n values of each of a
// row's columns, and whether it does: beyond 32 KiB too few blocks would run at once.
func normKept(cols, n int64) (shared int, keep int32) {
	if bytes := 4 * n * roundUp(cols, 4); bytes <= 32<<10 {
		return int(bytes), 1
	}
	return 0, 0
}

func bindLayerNorm(b *binding) { b.norm("layernorm_", b.args().Pointer(b.in(0))) }

func bindRMSNorm(b *binding) { b.norm("rmsnorm_", b.args().Pointer(b.in(0))) }

// norm adds the launch of a norm's kernel, whose first arguments say what it is taken of.
func (b *binding) norm(kernel string, args *driver.Args) {
	n, c := matrix(b.outBuf(0))
	shared, keep := normKept(c, 1)
	for i := 1; i < len(b.Op.In); i++ { // gamma and beta
		args.Pointer(b.in(i))
	}
	for i := range b.Op.Out { // y and the statistics
		args.Pointer(b.out(i))
	}
	b.rows(norm, kernel+b.float(b.outBuf(0)), n, normThreads(c), shared,
		args.Int64(c).Float32(float32(attr[graph.NormAttr](b).Eps)).Int32(keep))
}

var _ kernels.Joiner = (*Library)(nil)

// Join implements kernels.Joiner: a sum and the norm of it are one kernel, which reads
// what is added once and the sum not at all.
//
//	s = a + b;  y, mean, rstd = layernorm(s)
//
// The kernel of a row writes y after it has read its own row of a and b, while others'
// may still be read: y may lie where a or b does, exactly, and nowhere else in them.
func (l *Library) Join(first, second kernels.Binding) (device.Kernel, error) {
	name := map[graph.Kind]string{graph.LayerNorm: "add_layernorm_", graph.RMSNorm: "add_rmsnorm_"}[second.Op.Kind]
	if first.Op.Kind != graph.Add || name == "" || first.Op.Out[0].Mode == graph.Accum || !joins(&first, &second) {
		return nil, nil
	}
	b := &binding{Binding: second, lib: l, kernel: &kernel{}}
	added := &binding{Binding: first, lib: l, kernel: b.kernel}
	b.norm(name, b.args().Pointer(added.in(0)).Pointer(added.in(1)).Pointer(added.out(0)))
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

// joins says whether a norm is taken of just what a sum leaves, in memory of the device and
// at places that allow for one kernel.
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
	for _, in := range norm.In[1:] { // read when the sum is there
		if in.Overlaps(sum.Out[0]) {
			return false
		}
	}
	return true
}

// normGrad is the gradient of a layer norm, or with no mean of an RMS norm. The
// columns come first, as on the CPU.
func (b *binding) normGrad(mean, rstd, dbeta driver.Address, accumBeta int32) {
	x := b.inBuf(1)
	n, c := matrix(x)
	if b.hasOut(1) || b.hasOut(2) {
		b.normColumns(x, mean, rstd, n, c, dbeta, accumBeta)
	}
	if b.hasOut(0) {
		shared, keep := normKept(c, 2)
		b.rows(norm, "norm_dx_"+b.float(x), n, normThreads(c), shared,
			b.args().Pointer(b.in(0)).Pointer(b.in(1)).Pointer(b.in(2)).Pointer(mean).Pointer(rstd).Pointer(b.out(0)).Int64(c).Int32(b.accum(0)).Int32(keep))
	}
}

// normColumns is the gradients by gain and shift: the sums of lanes of rows, in the
// workspace, and those of the lanes.
func (b *binding) normColumns(x *graph.Buffer, mean, rstd driver.Address, n, c int64, dbeta driver.Address, accumBeta int32) {
	if n > 1<<31-1 {
		b.failf("%d rows are more than the kernel counts", n)
		return
	}
	lanes := cut.NormLanes(x.DType)
	gains := b.work(2 * 4 * lanes * c)
	shifts := gains + driver.Address(4*lanes*c)
	given := func(sums, y driver.Address) driver.Address {
		if y == 0 {
			return 0
		}
		return sums
	}
	b.launch(norm, "norm_columns_"+b.float(x), driver.Dim{X: uint32((c + 63) / 64), Y: uint32(lanes), Z: 1}, driver.Dim{X: 32, Y: 1, Z: 1}, 0,
		b.args().Pointer(b.in(0)).Pointer(b.in(1)).Pointer(mean).Pointer(rstd).Pointer(given(gains, b.out(1))).Pointer(given(shifts, dbeta)).Int64(n).Int64(c))
	add := func(t graph.DType, dgamma, dbeta driver.Address) {
		b.launch(norm, "norm_lanes_"+b.float(x)+"_"+suffix[t], driver.Dim{X: uint32((c + 63) / 64), Y: 2, Z: 1}, driver.Dim{X: 64, Y: 1, Z: 1}, 0,
			b.args().Pointer(gains).Pointer(shifts).Pointer(dgamma).Pointer(dbeta).Int64(c).Int32(b.accum(1)).Int32(accumBeta))
	}
	switch {
	case !b.hasOut(1):
		add(b.outBuf(2).DType, 0, dbeta)
	case !b.hasOut(2) || b.outBuf(1).DType == b.outBuf(2).DType:
		add(b.outBuf(1).DType, b.out(1), dbeta)
	default: // a kernel writes gradients of one type
		add(b.outBuf(1).DType, b.out(1), 0)
		add(b.outBuf(2).DType, 0, dbeta)
	}
}
