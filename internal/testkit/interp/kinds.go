package interp

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/attn"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// table returns the function that computes each kind.
func table[T num.Float]() map[graph.Kind]func(*call[T]) {
	return map[graph.Kind]func(*call[T]){
		graph.Embed:         embed[T],
		graph.EmbedGrad:     embedGrad[T],
		graph.AddPos:        addPos[T],
		graph.AddPosGrad:    addPosGrad[T],
		graph.Linear:        linear[T],
		graph.LinearAct:     linearAct[T],
		graph.LinearGradX:   linearGradX[T],
		graph.LinearGradAct: linearGradAct[T],
		graph.LinearGradW:   linearGradW[T],
		graph.LinearGradWB:  linearGradWB[T],
		graph.BiasGrad:      biasGrad[T],

		graph.LayerNorm:     layerNorm[T],
		graph.LayerNormGrad: layerNormGrad[T],
		graph.RMSNorm:       rmsNorm[T],
		graph.RMSNormGrad:   rmsNormGrad[T],
		graph.Softmax:       softmax[T],
		graph.SoftmaxGrad:   softmaxGrad[T],

		graph.Activation:     activation[T],
		graph.ActivationGrad: activationGrad[T],
		graph.SoftCap:        softCap[T],
		graph.SoftCapGrad:    softCapGrad[T],
		graph.SwiGLU:         swiglu[T],
		graph.SwiGLUGrad:     swigluGrad[T],
		graph.Add:            func(c *call[T]) { elementwise(c, func(a, b T) T { return a + b }) },
		graph.Sub:            func(c *call[T]) { elementwise(c, func(a, b T) T { return a - b }) },
		graph.Mul:            func(c *call[T]) { elementwise(c, func(a, b T) T { return T(a * b) }) },
		graph.Scale:          scale[T],
		graph.Sum:            sum[T],
		graph.SumGrad:        sumGrad[T],
		graph.Fill:           fillKind[T],
		graph.LossSeed:       lossSeed[T],
		graph.Copy:           copyKind[T],
		graph.Send:           send[T],
		graph.Recv:           recv[T],
		graph.Cast:           castKind[T],
		graph.SumParts:       sumParts[T],
		graph.SelectRow:      selectRow[T],
		graph.Rope:           rope[T],
		graph.RopeAt:         ropeAt[T],
		graph.Dropout:        dropout[T],
		graph.Attention:      attention[T],

		graph.AttentionCached: attentionCached[T],
		graph.AttentionGrad:   attentionGrad[T],

		graph.Im2Col:      im2col[T],
		graph.Col2Im:      col2im[T],
		graph.MaxPool:     maxPool[T],
		graph.MaxPoolGrad: maxPoolGrad[T],

		graph.CrossEntropy:     crossEntropy[T],
		graph.CrossEntropyGrad: crossEntropyGrad[T],
		graph.HeadLoss:         headLoss[T],
		graph.HeadLossGrad:     headLoss[T],
		graph.HeadStats:        headSlice[T],
		graph.HeadLSE:          headLSE[T],
		graph.HeadSliceGrad:    headSlice[T],

		graph.Quantize:      quantize[T],
		graph.Dequantize:    dequantize[T],
		graph.DequantizeSum: dequantize[T],

		graph.SqSum:    sqSum[T],
		graph.ClipCoef: clipCoef[T],

		graph.OverflowCheck:   overflowCheck[T],
		graph.LossScaleUpdate: lossScaleUpdate[T],

		"adamw":            adamW[T],
		"sgd":              sgd[T],
		"lamb_dir":         lambDirection[T],
		"lamb_apply":       lambApply[T],
		graph.ParamNorms:   paramNorms[T],
		graph.NewtonSchulz: newtonSchulz[T],
		"lars_apply":       larsApply[T],
		"muon_momentum":    muonMomentum[T],
		"muon_apply":       muonApply[T],
		"novograd":         novoGrad[T],
	}
}

// run runs a kernel of package vec or attn on one goroutine.
func (c *call[T]) run(k interface{ Run(*pool.Pool) error }) {
	if c.err == nil {
		c.err = k.Run(c.w.pool)
	}
}

func attr[A any, T num.Float](c *call[T]) A {
	a, ok := c.op.Attr.(A)
	if !ok {
		c.note(fmt.Errorf("attribute is %T, want %T", c.op.Attr, a))
	}
	return a
}

func embed[T num.Float](c *call[T]) {
	tokens, table := c.inI32(0), c.in(1)
	k := &vec.Embed[T]{N: len(tokens), V: table.rows, C: table.cols, Tokens: tokens, Table: table.v, Y: c.out(0).v}
	k.First, _, k.Total = c.slice()
	c.run(k)
}

func embedGrad[T num.Float](c *call[T]) {
	tokens, d := c.inI32(0), c.out(0)
	k := &vec.EmbedGrad[T]{N: len(tokens), V: d.rows, C: d.cols, Tokens: tokens, DY: c.in(1).v, DTable: d.v, Accumulate: c.accum(0)}
	k.First, _, k.Total = c.slice()
	c.run(k)
}

func addPos[T num.Float](c *call[T]) {
	x, pos, starts, y := c.in(0), c.in(1), c.in(2).v, c.out(0)
	seq, first := c.positions()
	for i := range y.v {
		y.v[i] = x.v[i] + pos.v[position(i/x.cols, first, seq, starts)*x.cols+i%x.cols]
	}
}

// positions returns the rows of a sample, and the index of the operation's first row among all
// rows.
func (c *call[T]) positions() (seq, first int) {
	a := attr[graph.PosAttr](c)
	return int(a.Seq), c.first(a.Rows)
}

// position is that of row n, from row first on, among its seq rows, counted from where its document
// starts.
func position[T num.Float](n, first, seq int, starts []T) int {
	t := (first + n) % seq
	if starts != nil {
		t -= int(starts[n])
	}
	return t
}

func addPosGrad[T num.Float](c *call[T]) {
	dy, starts, d := c.in(0), c.in(1).v, c.out(0)
	seq, first := c.positions()
	if !c.accum(0) {
		clear(d.v)
	}
	for i, v := range dy.v {
		d.v[position(i/dy.cols, first, seq, starts)*dy.cols+i%dy.cols] += v
	}
}

func layerNorm[T num.Float](c *call[T]) {
	x := c.in(0)
	c.run(&vec.LayerNorm[T]{
		N: x.rows, C: x.cols, Eps: T(attr[graph.NormAttr](c).Eps), X: x.v, Gamma: c.in(1).v, Beta: c.in(2).v,
		Y: c.out(0).v, Mean: c.out(1).v, Rstd: c.out(2).v,
	})
}

func layerNormGrad[T num.Float](c *call[T]) {
	x := c.in(1)
	c.run(&vec.LayerNormGrad[T]{
		N: x.rows, C: x.cols, DY: c.in(0).v, X: x.v, Gamma: c.in(2).v, Mean: c.in(3).v, Rstd: c.in(4).v,
		DX: c.out(0).v, DGamma: c.out(1).v, DBeta: c.out(2).v,
		AccumulateDX: c.accum(0), AccumulateDGamma: c.accum(1), AccumulateDBeta: c.accum(2),
	})
}

func rmsNorm[T num.Float](c *call[T]) {
	x := c.in(0)
	c.run(&vec.RMSNorm[T]{
		N: x.rows, C: x.cols, Eps: T(attr[graph.NormAttr](c).Eps), X: x.v, Gamma: c.in(1).v, Gain: c.gain(x.cols), Y: c.out(0).v, Rstd: c.out(1).v,
	})
}

func rmsNormGrad[T num.Float](c *call[T]) {
	x := c.in(1)
	c.run(&vec.RMSNormGrad[T]{
		N: x.rows, C: x.cols, DY: c.in(0).v, X: x.v, Gamma: c.in(2).v, Gain: c.gain(x.cols), Rstd: c.in(3).v,
		DX: c.out(0).v, DGamma: c.out(1).v, AccumulateDX: c.accum(0), AccumulateDGamma: c.accum(1),
	})
}

func softmax[T num.Float](c *call[T]) {
	x := c.in(0)
	c.run(&vec.Softmax[T]{N: x.rows, C: x.cols, X: x.v, Y: c.out(0).v})
}

func softmaxGrad[T num.Float](c *call[T]) {
	y := c.in(1)
	c.run(&vec.SoftmaxGrad[T]{N: y.rows, C: y.cols, DY: c.in(0).v, Y: y.v, DX: c.out(0).v, Accumulate: c.accum(0)})
}

// act returns an activation and its derivative.
func act[T num.Float](a graph.ActKind) (f, df func(T) T) {
	switch a {
	case graph.ActGELUTanh:
		return num.GELUTanh[T], num.GELUTanhGrad[T]
	case graph.ActGELU:
		return num.GELU[T], num.GELUGrad[T]
	case graph.ActSiLU:
		return num.SiLU[T], num.SiLUGrad[T]
	}
	return num.ReLU[T], nil
}

func activation[T num.Float](c *call[T]) {
	x, y := c.in(0), c.out(0)
	f, _ := act[T](attr[graph.ActAttr](c).Act)
	for i, v := range x.v {
		y.v[i] = f(v)
	}
}

func activationGrad[T num.Float](c *call[T]) {
	dy, x, dx := c.in(0), c.in(1), c.out(0)
	_, df := act[T](attr[graph.ActAttr](c).Act)
	for i, v := range x.v {
		var d T
		switch {
		case df != nil:
			d = T(dy.v[i] * df(v))
		case v > 0:
			d = dy.v[i]
		}
		c.store(0, &dx.v[i], d)
	}
}

func softCap[T num.Float](c *call[T]) {
	x, y := c.in(0), c.out(0)
	for i, v := range x.v {
		y.v[i] = num.SoftCap(v, T(attr[graph.CapAttr](c).Cap))
	}
}

func softCapGrad[T num.Float](c *call[T]) {
	dy, y, dx := c.in(0), c.in(1), c.out(0)
	for i, v := range y.v {
		c.store(0, &dx.v[i], T(dy.v[i]*num.SoftCapGrad(v, T(attr[graph.CapAttr](c).Cap))))
	}
}

// gain returns scratch for an RMS norm's gain of 1 + gamma, or nil if the gain is gamma.
func (c *call[T]) gain(width int) []T {
	if !attr[graph.NormAttr](c).PlusOne {
		return nil
	}
	return make([]T, width)
}

// store writes one element of output i, or adds to it.
func (c *call[T]) store(i int, dst *T, v T) {
	if c.accum(i) {
		v += *dst
	}
	*dst = v
}

func swiglu[T num.Float](c *call[T]) {
	c.run(&vec.SwiGLU[T]{Gate: c.in(0).v, Up: c.in(1).v, Y: c.out(0).v})
}

func swigluGrad[T num.Float](c *call[T]) {
	c.run(&vec.SwiGLUGrad[T]{DY: c.in(0).v, Gate: c.in(1).v, Up: c.in(2).v, DGate: c.out(0).v, DUp: c.out(1).v})
}

func elementwise[T num.Float](c *call[T], f func(a, b T) T) {
	a, b, y := c.in(0), c.in(1), c.out(0)
	for i := range y.v {
		c.store(0, &y.v[i], f(a.v[i], b.v[i]))
	}
}

func scale[T num.Float](c *call[T]) {
	x, y := c.in(0), c.out(0)
	f := T(attr[graph.ScaleAttr](c).Factor)
	for i, v := range x.v {
		c.store(0, &y.v[i], T(f*v))
	}
}

func sum[T num.Float](c *call[T]) {
	x := c.in(0)
	c.run(&vec.Sum[T]{X: x.v, Y: c.outF64(0), Work: make([]float64, vec.SumWork(len(x.v))), Accumulate: c.accum(0)})
}

func sumGrad[T num.Float](c *call[T]) {
	dy, dx := c.inF64(0), c.out(0)
	if c.err != nil {
		return
	}
	for i := range dx.v {
		c.store(0, &dx.v[i], T(dy[0]))
	}
}

func fillKind[T num.Float](c *call[T]) {
	v, id := attr[graph.FillAttr](c).Value, c.output(0)
	switch dt := c.w.prog.Buf(id).DType; dt {
	case graph.F32, graph.BF16, graph.F16:
		fill(c.out(0).v, T(v))
	case graph.F64:
		fill(c.outF64(0), v)
	case graph.I64:
		fill(c.outI64(0), int64(v))
	case graph.I32:
		dst, err := c.w.I32(c.rank, id)
		c.note(err)
		fill(dst, int32(v))
	default:
		c.note(fmt.Errorf("no interpretation of %v buffers", dt))
	}
}

func copyKind[T num.Float](c *call[T]) {
	src, dst := c.input(0), c.output(0)
	switch dt := c.w.prog.Buf(src).DType; dt {
	case graph.F32, graph.BF16, graph.F16:
		copy(c.out(0).v, c.in(0).v)
	case graph.F64:
		copy(c.outF64(0), c.inF64(0))
	case graph.I64:
		copy(c.outI64(0), c.inI64(0))
	case graph.I32:
		d, err := c.w.I32(c.rank, dst)
		c.note(err)
		copy(d, c.inI32(0))
	default:
		c.note(fmt.Errorf("no interpretation of %v buffers", dt))
	}
}

// send and recv pass messages between the stages of a program that has all stages on one rank.
func send[T num.Float](c *call[T]) {
	a := c.op.Attr.(graph.PeerAttr)
	c.w.sent[a] = append(c.w.sent[a], append([]T(nil), c.in(0).v...))
}

func recv[T num.Float](c *call[T]) {
	a := c.op.Attr.(graph.PeerAttr)
	if len(c.w.sent[a]) == 0 {
		c.note(fmt.Errorf("stage %d has sent nothing to stage %d", a.From, a.To))
		return
	}
	copy(c.out(0).v, c.w.sent[a][0])
	c.w.sent[a] = c.w.sent[a][1:]
}

func selectRow[T num.Float](c *call[T]) {
	x, key, y := c.in(0), c.inI64(1), c.out(0)
	if c.err != nil {
		return
	}
	r := key[graph.KeyRow]
	if r < 0 || r >= int64(x.rows) {
		c.note(fmt.Errorf("row is %d, want one of %d", r, x.rows))
		return
	}
	copy(y.v, x.v[int(r)*x.cols:])
}

func rope[T num.Float](c *call[T]) {
	x, y := c.in(0), c.out(0)
	a := attr[graph.RopeAttr](c)
	table := make([]T, a.Seq*a.HeadDim)
	c.run(&vec.RopeTable[T]{
		Seq: int(a.Seq), D: int(a.HeadDim), Theta: a.Theta, Table: table,
		Factor: a.ScaleFactor, LowFreq: a.LowFreq, HighFreq: a.HighFreq, Original: float64(a.OriginalPositions),
	})
	c.run(&vec.Rope[T]{
		N: x.rows, Heads: int(a.Heads), D: int(a.HeadDim), Seq: int(a.Seq), X: x.v, Y: y.v, Table: table, Starts: c.in(1).v, Inverse: a.Inverse,
	})
}

func ropeAt[T num.Float](c *call[T]) {
	x, positions, y := c.in(0), c.inI32(1), c.out(0)
	a := attr[graph.RopeAttr](c)
	if c.err != nil {
		return
	}
	table := make([]T, len(positions)*int(a.HeadDim))
	c.run(&vec.RopeTable[T]{
		Seq: len(positions), D: int(a.HeadDim), At: positions, Theta: a.Theta, Table: table,
		Factor: a.ScaleFactor, LowFreq: a.LowFreq, HighFreq: a.HighFreq, Original: float64(a.OriginalPositions),
	})
	c.run(&vec.Rope[T]{N: x.rows, Heads: int(a.Heads), D: int(a.HeadDim), Seq: x.rows, X: x.v, Y: y.v, Table: table, Inverse: a.Inverse})
}

func attentionCached[T num.Float](c *call[T]) {
	a := attr[graph.AttentionAttr](c)
	q, k, v, ldq, ldkv, n := heads(a, c.in)
	positions, key, keys, values := c.inI32(n), c.inI64(n+1), c.out(1), c.out(2)
	if c.err != nil {
		return
	}
	s, shape := attnShape(a), c.w.prog.Buf(c.op.Out[1].Buf).Shape
	capacity, first := int(shape[1]), int(key[graph.KeySlot])
	if first < 0 || first > int(shape[0])-s.B {
		c.note(fmt.Errorf("sequence 0 is in slot %d of %d", first, shape[0]))
		return
	}
	for b := range s.B {
		start := int(positions[b*s.Tq])
		if start < 0 || start > capacity-s.Tq {
			c.note(fmt.Errorf("row 0 of sequence %d is at position %d of %d", b, start, capacity))
			return
		}
		slot := (first + b) * capacity * keys.cols
		for r := range s.Tq {
			at, row := slot+(start+r)*keys.cols, (b*s.Tq+r)*ldkv
			copy(keys.v[at:at+keys.cols], k[row:])
			copy(values.v[at:at+keys.cols], v[row:])
		}
		one := s
		one.B, one.Tk = 1, start+s.Tq
		c.run(&attn.Forward[T]{
			Shape: one, Scale: T(a.Scale), Cap: T(a.Cap), Q: q[b*s.Tq*ldq:], K: keys.v[slot:], V: values.v[slot:], Y: c.out(0).v[b*s.Tq*s.H*s.D:],
			Work: make([]T, attn.ForwardWorkspace(one)), LdQ: ldq, KVRows: capacity,
		})
	}
}

func dropout[T num.Float](c *call[T]) {
	x, key, y := c.in(0), c.inI64(1), c.out(0)
	a := attr[graph.DropoutAttr](c)
	if c.err != nil {
		return
	}
	c.run(&vec.Dropout[T]{
		X: x.v, Y: y.v, Elems: int(a.Elems), First: c.first(a.Part), P: a.P, Site: uint32(a.Site), Seed: uint64(key[graph.KeySeed]),
		Sample: uint64(key[graph.KeyStep])<<40 + uint64(key[graph.KeySample]),
	})
}

// heads returns queries, keys and values and their row strides.
func heads[T num.Float](a graph.AttentionAttr, get func(int) tensor[T]) (q, k, v []T, ldq, ldkv, used int) {
	wq, wkv := int(a.Heads*a.HeadDim), int(a.KVHeads*a.HeadDim)
	if !a.Packed {
		return get(0).v, get(1).v, get(2).v, wq, wkv, 3
	}
	p := get(0).v
	if len(p) < wq+2*wkv {
		return nil, nil, nil, 0, 0, 1
	}
	return p, p[wq:], p[wq+wkv:], wq + 2*wkv, wq + 2*wkv, 1
}

func attnShape(a graph.AttentionAttr) attn.Shape {
	return attn.Shape{
		B: int(a.Batch), Tq: int(a.Seq), Tk: int(a.Seq), H: int(a.Heads), KV: int(a.KVHeads), D: int(a.HeadDim), Causal: a.Causal, Window: int(a.Window),
	}
}

func attention[T num.Float](c *call[T]) {
	a := attr[graph.AttentionAttr](c)
	s := attnShape(a)
	q, k, v, ldq, ldkv, n := heads(a, c.in)
	c.run(&attn.Forward[T]{
		Shape: s, Scale: T(a.Scale), Cap: T(a.Cap), Q: q, K: k, V: v, Y: c.out(0).v, Lse: c.out(1).v,
		Work: make([]T, attn.ForwardWorkspace(s)), LdQ: ldq, LdK: ldkv, LdV: ldkv, Starts: c.in(n).v,
	})
}

func attentionGrad[T num.Float](c *call[T]) {
	a := attr[graph.AttentionAttr](c)
	s := attnShape(a)
	q, k, v, ldq, ldkv, n := heads(a, c.in)
	dq, dk, dv, _, _, _ := heads(a, c.out)
	c.run(&attn.Backward[T]{
		Shape: s, Scale: T(a.Scale), Cap: T(a.Cap), Q: q, K: k, V: v, Y: c.in(n).v, Lse: c.in(n + 1).v, Dy: c.in(n + 2).v,
		Dq: dq, Dk: dk, Dv: dv, Work: make([]T, attn.BackwardWorkspace(s)),
		LdQ: ldq, LdK: ldkv, LdV: ldkv, LdDq: ldq, LdDk: ldkv, LdDv: ldkv, Starts: c.in(n + 3).v,
	})
}

func window(x []int64, a graph.ConvAttr) vec.Window {
	if len(x) != 4 {
		return vec.Window{} // its check refuses it
	}
	return vec.Window{
		B: int(x[0]), H: int(x[1]), W: int(x[2]), C: int(x[3]),
		KH: int(a.KH), KW: int(a.KW), Stride: int(a.Stride), Pad: int(a.Pad),
	}
}

func im2col[T num.Float](c *call[T]) {
	x := c.in(0)
	c.run(&vec.Im2Col[T]{Window: window(x.shape, attr[graph.ConvAttr](c)), X: x.v, Cols: c.out(0).v})
}

func col2im[T num.Float](c *call[T]) {
	dx := c.out(0)
	c.run(&vec.Col2Im[T]{
		Window: window(dx.shape, attr[graph.ConvAttr](c)), DCols: c.in(0).v, DX: dx.v, Accumulate: c.accum(0),
	})
}

func maxPool[T num.Float](c *call[T]) {
	x := c.in(0)
	c.run(&vec.MaxPool[T]{Window: window(x.shape, attr[graph.ConvAttr](c)), X: x.v, Y: c.out(0).v})
}

func maxPoolGrad[T num.Float](c *call[T]) {
	x := c.in(1)
	c.run(&vec.MaxPoolGrad[T]{
		Window: window(x.shape, attr[graph.ConvAttr](c)), DY: c.in(0).v, X: x.v, DX: c.out(0).v, Accumulate: c.accum(0),
	})
}
