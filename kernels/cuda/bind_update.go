package cuda

import (
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/kernels/cpu/exact"
)

const updates = "update.cu"

// Constants of update.cu: elements per block of an update and of a norm, and the most
// spans and parameters of one launch.
const (
	updateChunk = 4096
	normPiece   = 65536
	spansAtOnce = 16
	paramsOnce  = 64
)

// perSpans adds the launches of a kernel in which each block processes chunk elements of
// the spans. before and after add the parameters before and after the spans.
func (b *binding) perSpans(name string, spans []kernels.Span, chunk int, decay float64, before, after func(*driver.Args)) {
	for len(spans) > 0 {
		part := spans[:min(spansAtOnce, len(spans))]
		spans = spans[len(part):]
		var lo, hi, block, param [spansAtOnce]int64
		var decays [spansAtOnce]float64
		blocks := int64(0)
		for i, s := range part {
			lo[i], hi[i], block[i], param[i] = int64(s.Lo), int64(s.Hi), blocks, int64(s.Param)
			if s.Decay {
				decays[i] = decay
			}
			blocks += int64((s.Hi - s.Lo + chunk - 1) / chunk)
		}
		args := b.args()
		before(args)
		args.Int64(int64(len(part))) // struct Spans
		for _, list := range [][spansAtOnce]int64{lo, hi, block, param} {
			for _, v := range list {
				args.Int64(v)
			}
		}
		for _, v := range decays {
			args.Float64(v)
		}
		after(args)
		b.rows(updates, name, blocks, threads, 0, args)
	}
}

// spans returns kernels.Binding.Spans; an error fails the binding.
func (b *binding) spans(a graph.ShardAttr) ([]kernels.Span, []bool) {
	spans, trainable, err := b.Spans(a)
	if err != nil {
		b.failf("%w", err)
	}
	return spans, trainable
}

// floatType returns the number that update.cu uses for a buffer's float type.
func (b *binding) floatType(buf *graph.Buffer) int32 {
	switch buf.DType {
	case graph.F32:
		return 0
	case graph.BF16:
		return 1
	case graph.F16:
		return 2
	}
	b.failf("%s is %v, want a float type", buf.Name, buf.DType)
	return 0
}

// low returns the address and type of output i, the 16-bit copy of the parameters that an
// update writes. The address is 0 if there is none.
func (b *binding) low(i int) (driver.Address, int32) {
	if !b.hasOut(i) {
		return 0, 0
	}
	return b.out(i), b.floatType(b.outBuf(i))
}

// sqSums adds the launches that add the squares of an operand to exact accumulators. Each
// parameter has every accumulators, and which is the index of the one to add to.
func (b *binding) sqSums(spans []kernels.Span, x driver.Address, buf *graph.Buffer, acc driver.Address, every, which int32) {
	b.perSpans("sqsum", spans, normPiece, 0,
		func(a *driver.Args) { a.Pointer(x).Pointer(acc) },
		func(a *driver.Args) { a.Int32(b.floatType(buf)).Int32(every).Int32(which) })
}

func bindSqSum(b *binding) {
	spans, _ := b.spans(attr[graph.ShardAttr](b))
	b.sqSums(spans, b.in(0), b.inBuf(0), b.out(0), 0, 0)
}

// accumulator checks that an operand is one exact accumulator (exact.Limbs elements).
func (b *binding) accumulator(buf *graph.Buffer) {
	if n := buf.Elems(); n != exact.Limbs {
		b.failf("%s has %d elements, want one accumulator of %d", buf.Name, n, exact.Limbs)
	}
}

func bindClipCoef(b *binding) {
	b.accumulator(b.inBuf(0))
	b.rows(updates, "clip_coef", 1, 32, 0,
		b.args().Pointer(b.in(0)).Pointer(b.in(1)).Pointer(b.out(0)).Pointer(b.out(1)).Float64(attr[graph.ClipAttr](b).Max))
}

func bindOverflowCheck(b *binding) {
	b.accumulator(b.inBuf(0))
	b.rows(updates, "overflow_check", 1, 32, 0, b.args().Pointer(b.in(0)).Pointer(b.out(0)))
}

func bindLossScaleUpdate(b *binding) {
	a := attr[graph.LossScaleAttr](b)
	b.rows(updates, "loss_scale_update", 1, 32, 0,
		b.args().Pointer(b.in(0)).Pointer(b.out(0)).Float64(a.Growth).Float64(a.Backoff).Float64(a.Floor).Int64(a.Interval).Int64(a.Hysteresis))
}

func bindAdamW(b *binding) {
	a := attr[graph.UpdateAttr](b)
	if b.Program.Buf(b.Op.Out[1].Buf).DType == graph.U8 {
		b.failf("moments in 8 bits; the GPU's kernel takes f32")
		return
	}
	spans, _ := b.spans(a.Shard)
	low, lowType := b.low(3)
	b.perSpans("adamw", spans, updateChunk, a.Decay,
		func(k *driver.Args) {
			k.Pointer(b.in(0)).Pointer(b.in(1)).Pointer(b.in(2)).Pointer(b.out(0)).Pointer(b.out(1)).Pointer(b.out(2)).Pointer(low)
		},
		func(k *driver.Args) {
			k.Float64(a.Beta1).Float64(a.Beta2).Float64(a.Eps).Int32(b.floatType(b.inBuf(0))).Int32(lowType)
		})
}

// norms checks that an operand holds two exact accumulators for each of the unit's
// parameters.
func (b *binding) norms(buf *graph.Buffer, params int) {
	if want := int64(2 * params * exact.Limbs); buf.Elems() != want {
		b.failf("operand norms has %d elements, want %d: 2 accumulators of %d for each of the unit's %d parameters", buf.Elems(), want, exact.Limbs, params)
	}
}

func bindLAMBDirection(b *binding) {
	a := attr[graph.UpdateAttr](b)
	spans, trainable := b.spans(a.Shard)
	if err := b.WholeParams(a.Shard.Unit); err != nil {
		b.failf("%w", err)
	}
	b.norms(b.outBuf(3), len(trainable))
	b.perSpans("lamb_direction", spans, updateChunk, a.Decay,
		func(k *driver.Args) {
			k.Pointer(b.in(0)).Pointer(b.in(1)).Pointer(b.in(2)).Pointer(b.out(0)).Pointer(b.out(1)).Pointer(b.out(2))
		},
		func(k *driver.Args) { k.Float64(a.Beta1).Float64(a.Beta2).Float64(a.Eps) })
	adapted := kernels.Adapted(a, spans)
	b.sqSums(adapted, b.in(0), b.inBuf(0), b.out(3), 2, 0)
	b.sqSums(adapted, b.out(0), b.outBuf(0), b.out(3), 2, 1)
}

func bindParamNorms(b *binding) {
	a := attr[graph.UpdateAttr](b)
	spans, trainable := b.spans(a.Shard)
	if err := b.WholeParams(a.Shard.Unit); err != nil {
		b.failf("%w", err)
	}
	b.norms(b.outBuf(0), len(trainable))
	adapted := kernels.Adapted(a, spans)
	b.sqSums(adapted, b.in(0), b.inBuf(0), b.out(0), 2, 0)
	b.sqSums(adapted, b.in(1), b.inBuf(1), b.out(0), 2, 1)
}

func bindLAMBApply(b *binding) {
	a := attr[graph.UpdateAttr](b)
	spans, trainable := b.spans(a.Shard)
	b.norms(b.inBuf(1), len(trainable))
	low, lowType := b.low(1)
	b.perSpans("lamb_apply", spans, updateChunk, 0,
		func(k *driver.Args) {
			k.Pointer(b.in(0)).Pointer(b.in(1)).Pointer(b.in(3)).Pointer(b.out(0)).Pointer(low)
		},
		func(k *driver.Args) { k.Int32(b.floatType(b.inBuf(0))).Int32(lowType) })
}

// Ways in which an update with momentum applies the learning rate: the enum of update.cu.
const (
	ruleSGD int32 = iota
	ruleLARS
	ruleLARC
	ruleNovoGrad
)

// bindMomentum binds SGD, without norms, or LARS.
func bindMomentum(b *binding, rule int32) {
	a := attr[graph.UpdateAttr](b)
	spans, trainable := b.spans(a.Shard)
	var norms driver.Address
	scalars := 1 // index of input coef, which hyper follows
	if rule != ruleSGD {
		b.norms(b.inBuf(1), len(trainable))
		norms, scalars = b.in(1), 2
		if a.Clip {
			rule = ruleLARC
		}
	}
	b.momentum(a, spans, rule, norms, b.in(scalars), b.in(scalars+1), 0, 2)
}

func (b *binding) momentum(a graph.UpdateAttr, spans []kernels.Span, rule int32, norms, coef, hyper, second driver.Address, lowOut int) {
	low, lowType := b.low(lowOut)
	b.perSpans("momentum", spans, updateChunk, a.Decay,
		func(k *driver.Args) {
			k.Pointer(b.in(0)).Pointer(norms).Pointer(coef).Pointer(hyper).Pointer(b.out(0)).Pointer(b.out(1)).Pointer(second).Pointer(low)
		},
		func(k *driver.Args) {
			k.Float64(a.Beta1).Float64(a.Eps).Float64(a.Trust).Float64(a.Unadapted()).Int32(rule).Int32(flag(a.Nesterov)).Int32(b.floatType(b.inBuf(0))).Int32(lowType)
		})
}

// bindNovoGrad updates the second moments of all trainable parameters of the unit, even of those in
// other ranks' shards: v is the same on all ranks.
func bindNovoGrad(b *binding) {
	a := attr[graph.UpdateAttr](b)
	spans, trainable := b.spans(a.Shard)
	b.norms(b.inBuf(1), len(trainable))
	var params []int64
	for i, on := range trainable {
		if on {
			params = append(params, int64(i))
		}
	}
	for len(params) > 0 {
		part := params[:min(paramsOnce, len(params))]
		params = params[len(part):]
		args := b.args().Pointer(b.in(1)).Pointer(b.in(2)).Pointer(b.out(2)).Int64(int64(len(part)))
		for i := range paramsOnce {
			v := int64(0)
			if i < len(part) {
				v = part[i]
			}
			args.Int64(v)
		}
		b.rows(updates, "novograd_moments", 1, paramsOnce, 0, args.Float64(a.Beta2))
	}
	b.momentum(a, spans, ruleNovoGrad, b.in(1), b.in(2), b.in(3), b.out(2), 3)
}
