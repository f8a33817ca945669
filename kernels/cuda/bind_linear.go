package cuda

import (
	"errors"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
)

const linear = "linear.cu"

// product is a step that runs one call of the matrix product library.
type product struct{ call blas.Call }

func (p *product) enqueue(_ driver.API, s driver.Stream) error { return p.call.Enqueue(s) }

// bindProduct returns a matrix product as a step. The library's kernels have no predicate, so
// operations with one are rejected.
func (b *binding) bindProduct(p blas.Product, at blas.Places) (step, error) {
	switch {
	case b.err != nil:
		return nil, b.err
	case b.skip != 0:
		return nil, errors.New("a matrix product cannot be skipped by a predicate")
	case b.lib.o.Products == nil:
		return nil, errors.New("there is no library of matrix products")
	}
	call, err := b.lib.o.Products.Bind(p, at)
	if err != nil {
		return nil, err
	}
	return &product{call}, nil
}

// product adds a product to the kernel.
func (b *binding) product(p blas.Product, at blas.Places) {
	s, err := b.bindProduct(p, at)
	if err != nil {
		b.failf("%w", err)
		return
	}
	b.kernel.steps = append(b.kernel.steps, s)
}

// packed describes a matrix whose rows of cols elements have no padding between them.
func packed(t graph.DType, cols int64, trans bool) blas.Matrix {
	return blas.Matrix{Type: t, Ld: cols, Trans: trans}
}

// linearProduct describes y = x·w of a linear layer with x (m,in) and w (in,out), or
// (out,in) if trans.
func linearProduct(x, w, y graph.DType, m, in, out int64, trans bool) blas.Product {
	cols := out
	if trans {
		cols = in
	}
	return blas.Product{
		M: m, N: out, K: in, A: packed(x, in, false), B: packed(w, cols, trans), C: packed(y, out, false),
		Workspace: cut.ProductWork(m, out, in),
	}
}

// gradXProduct describes dy (m,out) · wᵀ → dx (m,in).
func gradXProduct(dy, w, dx graph.DType, m, in, out int64, trans bool) blas.Product {
	return linearProduct(dy, w, dx, m, out, in, !trans)
}

// gradWProduct describes xᵀ·dy → dw (in,out), or transposed dyᵀ·x → dw (out,in).
func gradWProduct(x, dy, dw graph.DType, m, in, out int64, trans bool) blas.Product {
	if trans {
		in, out = out, in
	}
	return blas.Product{
		M: in, N: out, K: m, A: packed(x, in, true), B: packed(dy, out, false), C: packed(dw, out, false),
		Workspace: cut.ProductWork(in, out, m),
	}
}

func bindLinear(b *binding) {
	a := attr[graph.LinearAttr](b)
	x, w, y := b.inBuf(0), b.inBuf(1), b.outBuf(0)
	m, in := matrix(x)
	_, out := matrix(y)
	p := linearProduct(x.DType, w.DType, y.DType, m, in, out, a.TransW)
	to := b.out(0)
	if a.Act != graph.ActNone && b.hasOut(1) {
		to = b.out(1)
	}
	at := blas.Places{A: b.in(0), B: b.in(1), C: to, Work: b.work(p.Workspace)}
	if b.hasIn(2) {
		b.biased(p, at, b.in(2), y)
	} else {
		b.product(p, at)
	}
	if a.Act != graph.ActNone {
		b.activated(a.Act, y, to)
	}
}

// activated adds the launch of an activation that reads address from and writes output 0.
func (b *binding) activated(act graph.ActKind, y *graph.Buffer, from driver.Address) {
	n := y.Elems()
	b.over(elementwise, "act_"+string(act)+"_"+b.float(y), n, perThread(y), b.args().Pointer(from).Pointer(b.out(0)).Int64(n))
}

// bindLinearAct binds a product with bias and activation in its epilogue, which also
// writes the pre-activation sum. If the library has no such algorithm, it binds the
// product, whose result is rounded, and a kernel for the activation. The choice depends on
// shapes and types only, so that every program with them makes the same choice.
func bindLinearAct(b *binding) {
	a := attr[graph.LinearAttr](b)
	x, w, y := b.inBuf(0), b.inBuf(1), b.outBuf(0)
	m, in := matrix(x)
	_, out := matrix(y)
	p := linearProduct(x.DType, w.DType, y.DType, m, in, out, a.TransW)
	at := blas.Places{A: b.in(0), B: b.in(1), C: b.out(1), Work: b.work(p.Workspace)}
	if a.Act == cut.Activation && y.DType != graph.F32 && out%blas.AuxLd == 0 {
		whole, with := p, at
		whole.GELU, with.C, with.Aux = true, b.out(0), b.out(1)
		if b.hasIn(2) {
			whole.Bias, with.Bias = true, b.in(2)
		}
		if b.whole(whole, with) {
			return
		}
	}
	if b.hasIn(2) {
		b.biased(p, at, b.in(2), y)
	} else {
		b.product(p, at)
	}
	b.activated(a.Act, y, b.out(1))
}

// biased adds a product whose epilogue adds a bias to every row. If the library has no such
// algorithm, a kernel after the product adds the bias. The choice depends only on shapes and types.
func (b *binding) biased(p blas.Product, at blas.Places, bias driver.Address, y *graph.Buffer) {
	whole, with := p, at
	whole.Bias, with.Bias = true, bias
	if b.whole(whole, with) {
		return
	}
	b.product(p, at)
	b.overRows(linear, "add_bias_"+b.float(y), p.M, p.N, perThread(y), b.args().Pointer(bias).Pointer(at.C).Int64(p.M).Int64(p.N))
}

// whole adds a product with its epilogue. It returns false if the library has no
// algorithm for that epilogue.
func (b *binding) whole(p blas.Product, at blas.Places) bool {
	s, err := b.bindProduct(p, at)
	if errors.Is(err, blas.ErrUnsupported) {
		return false
	}
	if err != nil {
		b.failf("%w", err)
		return true
	}
	b.kernel.steps = append(b.kernel.steps, s)
	return true
}

func bindLinearGrad(b *binding) {
	p, at := gradient(b)
	at.Work = b.work(p.Workspace)
	b.product(p, at)
}

// gradient returns the product of a linear layer's gradient and the addresses of its
// operands.
func gradient(b *binding) (p blas.Product, at blas.Places) {
	trans := attr[graph.LinearAttr](b).TransW
	first, second, d := b.inBuf(0), b.inBuf(1), b.outBuf(0)
	at = blas.Places{A: b.in(0), B: b.in(1), C: b.out(0)}
	m, cols := matrix(first)
	if b.Op.Kind == graph.LinearGradX { // dy, w → dx
		_, in := matrix(d)
		p = gradXProduct(first.DType, second.DType, d.DType, m, in, cols, trans)
	} else { // x, dy → dw
		_, out := matrix(second)
		p = gradWProduct(first.DType, second.DType, d.DType, m, cols, out, trans)
		if trans {
			at.A, at.B = at.B, at.A
		}
	}
	p.Accumulate = b.accum(0) == 1
	return p, at
}

// bindLinearGradWB binds the product of dw, whose epilogue sums dy over K, the bias
// gradient. If the library has no such algorithm, kernels after the product compute the sums.
// The choice depends on shapes and types only. The epilogue overwrites its result: sums to be
// accumulated go first into the workspace, after the product's part of it.
func bindLinearGradWB(b *binding) {
	p, at := gradient(b)
	dy, dw, db := b.inBuf(1), b.outBuf(0), b.outBuf(1)
	m, n := matrix(dy)
	own := roundUp(p.Workspace, workAlign)
	at.Work = b.work(max(own+4*n, cut.ColumnWork(m, n)))
	if dy.DType != graph.F32 && dw.DType == db.DType {
		whole, with := p, at
		if whole.Sums = blas.SumsB; attr[graph.LinearAttr](b).TransW {
			whole.Sums = blas.SumsA
		}
		if with.Sums = b.out(1); b.accum(1) == 1 {
			with.Sums = at.Work + driver.Address(own)
		}
		if b.whole(whole, with) {
			if b.accum(1) == 1 {
				b.columnSums(with.Sums, db, 1, n, b.out(1), db, 1, 0)
			}
			return
		}
	}
	b.product(p, at)
	b.columnSums(b.in(1), dy, m, n, b.out(1), db, b.accum(1), at.Work)
}

// bindLinearGradAct binds a product whose epilogue multiplies by the activation's
// derivative. If the library has no such algorithm, a kernel after the product does it. The
// choice depends on shapes and types only.
func bindLinearGradAct(b *binding) {
	a := attr[graph.LinearAttr](b)
	dy, w, d := b.inBuf(0), b.inBuf(1), b.outBuf(0)
	m, out := matrix(dy)
	_, in := matrix(d)
	p := gradXProduct(dy.DType, w.DType, d.DType, m, in, out, a.TransW)
	at := blas.Places{A: b.in(0), B: b.in(1), C: b.out(0), Work: b.work(p.Workspace)}
	if a.Act == cut.Activation && d.DType != graph.F32 && in%blas.AuxLd == 0 {
		whole, with := p, at
		whole.DGELU, with.Aux = true, b.in(2)
		if b.whole(whole, with) {
			return
		}
	}
	b.product(p, at)
	n := m * in
	b.over(elementwise, "act_grad_"+string(a.Act)+"_"+b.float(d), n, perThread(d),
		b.args().Pointer(b.out(0)).Pointer(b.in(2)).Pointer(b.out(0)).Int64(n).Int32(0))
}

func bindBiasGrad(b *binding) {
	x := b.inBuf(0)
	rows, cols := matrix(x)
	b.columnSums(b.in(0), x, rows, cols, b.out(0), b.outBuf(0), b.accum(0), b.work(cut.ColumnWork(rows, cols)))
}

// columnSums adds the launches that sum the columns of x (rows,cols) into y (cols). xs and
// ys give the element types of x and y; work holds the partial sums.
func (b *binding) columnSums(x driver.Address, xs *graph.Buffer, rows, cols int64, y driver.Address, ys *graph.Buffer, accumulate int32, work driver.Address) {
	parts := cut.Columns(rows)
	partRows := (rows + parts - 1) / parts
	const width, lanes = 8, 8 // block shape in linear.cu; each thread reads 16 bytes of columns
	columns := width * perThread(xs)
	grid := driver.Dim{X: uint32((cols + columns - 1) / columns), Y: uint32(parts), Z: 1}
	block := driver.Dim{X: width, Y: lanes, Z: 1}
	in := "columns_" + b.float(xs) + "_"
	if parts == 1 {
		b.launch(linear, in+b.float(ys), grid, block, 0,
			b.args().Pointer(x).Int64(rows).Int64(cols).Int64(partRows).Pointer(y).Int64(0).Int32(accumulate))
		return
	}
	b.launch(linear, in+"f32", grid, block, 0,
		b.args().Pointer(x).Int64(rows).Int64(cols).Int64(partRows).Pointer(work).Int64(cols).Int32(0))
	b.over(linear, "column_parts_"+b.float(ys), cols, 4,
		b.args().Pointer(work).Int64(parts).Int64(cols).Pointer(y).Int32(accumulate))
}
