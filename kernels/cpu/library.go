// Package cpu binds the operations of a step program to the CPU's kernels.
//
// Binding checks everything that can be wrong (the operation against the kind table, its operands'
// memory, its workspace) and prepares a kernel whose execution allocates nothing. The arithmetic is
// in the packages below: gemm, attn, vec, exact.
package cpu

import (
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/device"
	devcpu "github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

type library struct {
	pool     *pool.Pool
	portable bool
}

// New returns the kernels of the CPU device. All of them compute on p's threads; results do not
// depend on the number of threads.
func New(p *pool.Pool) kernels.Library { return &library{pool: p} }

// NewPortable does the same as New, with bf16 products that have the same bits on every CPU
// (gemm.Spec.Portable).
func NewPortable(p *pool.Pool) kernels.Library { return &library{pool: p, portable: true} }

// binder prepares an operation and returns a function that executes it. The result is invalid once
// the binding has an error.
type binder func(b *binding) func() error

// kernel is a bound operation.
type kernel struct {
	label   string
	touches []device.Ptr
	skip    []int32 // the predicate; nil: always runs
	body    func() error
}

var _ devcpu.Kernel = (*kernel)(nil)

func (k *kernel) Touches() []device.Ptr { return k.touches }
func (k *kernel) Label() string         { return k.label }

// Run executes the operation, unless its predicate says to skip it.
func (k *kernel) Run() error {
	if k.skip != nil && k.skip[0] != 0 {
		return nil
	}
	return k.body()
}

// Bind prepares an operation. It returns an error that names operation and operand for kinds
// without a kernel (the executor runs collectives and copies), for operations that graph.Check
// rejects, and for operands and workspace in invalid memory.
func (l *library) Bind(kb kernels.Binding) (device.Kernel, error) {
	if kb.Program == nil || kb.Op == nil || l.pool == nil {
		return nil, errors.New("cpu: bind: want a program, an operation and a pool")
	}
	bind, ok := binders[kb.Op.Kind]
	if kb.Op.BringsKernels() {
		bind, ok = bindOwn, true
	}
	if !ok {
		return nil, fmt.Errorf("cpu: bind %s: no kernel for kind %q", kb.Op.Name, kb.Op.Kind)
	}
	if err := graph.Check(kb.Program, kb.Op); err != nil {
		return nil, fmt.Errorf("cpu: bind: %w", err)
	}
	b := &binding{Binding: kb, pool: l.pool, portable: l.portable}
	k := &kernel{label: kb.Op.Name}
	b.places()
	if kb.Op.Skip != graph.NoBuf {
		if k.skip = view[int32](b, "skip", kb.Skip); b.err == nil && len(k.skip) != 1 {
			b.failf("skip has %d elements, want 1", len(k.skip))
		}
	}
	if b.err == nil {
		k.body = bind(b)
	}
	if b.err != nil {
		return nil, b.err
	}
	k.touches = b.touches
	return k, nil
}

// binders has an entry for every kind except collectives and copies.
var binders = map[graph.Kind]binder{
	graph.Embed:         bindEmbed,
	graph.EmbedGrad:     bindEmbedGrad,
	graph.AddPos:        bindAddPos,
	graph.AddPosGrad:    bindAddPosGrad,
	graph.Linear:        bindLinear,
	graph.LinearAct:     bindLinearAct,
	graph.LinearGradX:   bindLinearGrad,
	graph.LinearGradAct: bindLinearGradAct,
	graph.LinearGradW:   bindLinearGrad,
	graph.LinearGradWB:  bindLinearGradWB,
	graph.BiasGrad:      bindBiasGrad,

	graph.LayerNorm:     bindLayerNorm,
	graph.LayerNormGrad: bindLayerNormGrad,
	graph.RMSNorm:       bindRMSNorm,
	graph.RMSNormGrad:   bindRMSNormGrad,
	graph.Softmax:       bindSoftmax,
	graph.SoftmaxGrad:   bindSoftmaxGrad,

	graph.Activation:     bindActivation,
	graph.ActivationGrad: bindActivationGrad,
	graph.SwiGLU:         bindSwiGLU,
	graph.SwiGLUGrad:     bindSwiGLUGrad,
	graph.Add:            bindBinary,
	graph.Sub:            bindBinary,
	graph.Mul:            bindBinary,
	graph.Scale:          bindScale,
	graph.Sum:            bindSum,
	graph.SumGrad:        bindSumGrad,
	graph.Fill:           bindFill,
	graph.Cast:           bindCast,
	graph.SumParts:       bindSumParts,
	graph.SelectRow:      bindSelectRow,
	graph.Rope:           bindRope,
	graph.RopeAt:         bindRope,
	graph.Dropout:        bindDropout,
	graph.SoftCap:        bindSoftCap,
	graph.SoftCapGrad:    bindSoftCapGrad,
	graph.Attention:      bindAttention,

	graph.AttentionCached: bindAttentionCached,
	graph.AttentionGrad:   bindAttentionGrad,

	graph.Im2Col:      bindIm2Col,
	graph.Col2Im:      bindCol2Im,
	graph.MaxPool:     bindMaxPool,
	graph.MaxPoolGrad: bindMaxPoolGrad,

	graph.CrossEntropy:     bindCrossEntropy,
	graph.CrossEntropyGrad: bindCrossEntropyGrad,
	graph.LossSeed:         bindLossSeed,
	graph.HeadLoss:         bindHeadLoss,
	graph.HeadLossGrad:     bindHeadLoss,
	graph.HeadStats:        bindHeadSlice,
	graph.HeadLSE:          bindHeadLSE,
	graph.HeadSliceGrad:    bindHeadSlice,

	graph.Quantize:      bindQuantize,
	graph.Dequantize:    bindDequantize,
	graph.DequantizeSum: bindDequantize,

	graph.SqSum:    bindSqSum,
	graph.ClipCoef: bindClipCoef,
	"adamw":        bindAdamW,

	graph.OverflowCheck:   bindOverflowCheck,
	graph.LossScaleUpdate: bindLossScaleUpdate,
	"sgd":                 bindSGD,
	"lamb_dir":            bindLAMBDirection,
	"lamb_apply":          bindLAMBApply,
	graph.ParamNorms:      bindParamNorms,
	graph.NewtonSchulz:    bindNewtonSchulz,
	"lars_apply":          bindLARSApply,
	"muon_momentum":       bindMuonMomentum,
	"muon_apply":          bindMuonApply,
	"novograd":            bindNovoGrad,
}
