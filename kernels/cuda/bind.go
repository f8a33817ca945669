package cuda

import (
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
)

// binder prepares an operation of one kind: it adds the launches that execute it. If the
// binding has an error, the launches are invalid.
type binder func(b *binding)

// binders has an entry for every kind except collectives and copies.
var binders = map[graph.Kind]binder{
	graph.Embed:      bindEmbed,
	graph.EmbedGrad:  bindEmbedGrad,
	graph.AddPos:     bindAddPos,
	graph.AddPosGrad: bindAddPosGrad,
	graph.SelectRow:  bindSelectRow,
	graph.Rope:       bindRope,

	graph.Linear:        bindLinear,
	graph.LinearAct:     bindLinearAct,
	graph.LinearGradX:   bindLinearGrad,
	graph.LinearGradAct: bindLinearGradAct,
	graph.LinearGradW:   bindLinearGrad,
	graph.LinearGradWB:  bindLinearGradWB,
	graph.BiasGrad:      bindBiasGrad,

	graph.LayerNorm:     func(b *binding) { b.norm("layernorm_", b.operands()) },
	graph.LayerNormGrad: func(b *binding) { b.normGrad(b.in(3), b.in(4), b.out(2), b.accum(2)) },
	graph.RMSNorm:       func(b *binding) { b.norm("rmsnorm_", b.operands()) },
	graph.RMSNormGrad:   func(b *binding) { b.normGrad(0, b.in(3), 0, 0) },

	graph.Softmax:          bindSoftmax,
	graph.SoftmaxGrad:      bindSoftmaxGrad,
	graph.CrossEntropy:     bindCrossEntropy,
	graph.CrossEntropyGrad: bindCrossEntropyGrad,
	graph.HeadLoss:         bindHeadLoss,
	graph.HeadLossGrad:     bindHeadLoss,

	graph.Add:            func(b *binding) { b.elementwise("add", true) },
	graph.Sub:            func(b *binding) { b.elementwise("sub", true) },
	graph.Mul:            func(b *binding) { b.elementwise("mul", true) },
	graph.Scale:          func(b *binding) { b.elementwise("scale", true, float32(attr[graph.ScaleAttr](b).Factor)) },
	graph.SumGrad:        func(b *binding) { b.elementwise("sum_grad", true) },
	graph.Activation:     func(b *binding) { b.elementwise("act_"+string(attr[graph.ActAttr](b).Act), false) },
	graph.ActivationGrad: func(b *binding) { b.elementwise("act_grad_"+string(attr[graph.ActAttr](b).Act), true) },
	graph.SwiGLU:         func(b *binding) { b.elementwise("swiglu", false) },
	graph.SwiGLUGrad:     func(b *binding) { b.elementwise("swiglu_grad", false) },
	graph.Sum:            bindSum,
	graph.Fill:           bindFill,
	graph.Cast:           bindCast,
	graph.SumParts:       bindSumParts,
	graph.Dropout:        bindDropout,

	graph.Attention:     bindAttention,
	graph.AttentionGrad: bindAttentionGrad,

	graph.Im2Col:      func(b *binding) { b.conv("im2col", b.inBuf(0), false) },
	graph.Col2Im:      func(b *binding) { b.conv("col2im", b.outBuf(0), true) },
	graph.MaxPool:     func(b *binding) { b.conv("maxpool", b.inBuf(0), false) },
	graph.MaxPoolGrad: func(b *binding) { b.conv("maxpool_grad", b.inBuf(1), true) },

	graph.SqSum:           bindSqSum,
	graph.ClipCoef:        bindClipCoef,
	graph.OverflowCheck:   bindOverflowCheck,
	graph.LossScaleUpdate: bindLossScaleUpdate,
	"adamw":               bindAdamW,
	"sgd":                 func(b *binding) { bindMomentum(b, ruleSGD) },
	"lamb_dir":            bindLAMBDirection,
	"lamb_apply":          bindLAMBApply,
	graph.ParamNorms:      bindParamNorms,
	"lars_apply":          func(b *binding) { bindMomentum(b, ruleLARS) },
	"novograd":            bindNovoGrad,
}

// Bind prepares an operation. It returns an error that names the operation and the operand
// if the kind has no kernel (the executor runs collectives and copies itself), if graph.Check
// rejects the operation, or if an operand or the workspace has invalid memory. A source that
// does not compile is an error too.
func (l *Library) Bind(kb kernels.Binding) (device.Kernel, error) {
	if kb.Program == nil || kb.Op == nil {
		return nil, errors.New("cuda: bind: want a program and an operation")
	}
	bind, ok := binders[kb.Op.Kind]
	if kb.Op.BringsKernels() {
		bind, ok = bindOwn, true
	}
	if !ok {
		return nil, fmt.Errorf("cuda: bind %s: no kernel for kind %q", kb.Op.Name, kb.Op.Kind)
	}
	if err := graph.Check(kb.Program, kb.Op); err != nil {
		return nil, fmt.Errorf("cuda: bind: %w", err)
	}
	if what := graph.CUDATarget().Lacks(kb.Op); what != "" {
		return nil, fmt.Errorf("cuda: bind %s (%s): no kernel for %s", kb.Op.Name, kb.Op.Kind, what)
	}
	b := &binding{Binding: kb, lib: l, kernel: &kernel{}}
	touches, err := b.Places()
	if err != nil {
		b.failf("%w", err)
		return nil, b.err
	}
	b.kernel.operands = of(&b.Binding, touches)
	if b.onHost() {
		return b.bindHost()
	}
	if kb.Op.Skip != graph.NoBuf {
		if buf := kb.Program.Buf(kb.Op.Skip); buf.DType != graph.I32 || buf.Elems() != 1 {
			b.failf("skip (%s) is %v %v, want one i32", buf.Name, buf.DType, buf.Shape)
		}
		b.skip = b.address("skip", kb.Skip)
	}
	if b.err == nil {
		bind(b)
	}
	if b.err != nil {
		return nil, b.err
	}
	return b.kernel, nil
}
