package graph

// Kind names an operation. Every kind has an entry in the kind table (Info): Doc says what it
// computes, In and Out its operands with their shapes, where N is tokens (rows · T) and C a width.
//
// In mixed precision the values of an operation (Operand.Float: ComputeFloat)
// are all bf16 or all f16 instead of f32; gradients of parameters (GradFloat)
// that or f32. Statistics (mean, rstd, lse), logits of a cross-entropy, losses
// and optimizer states stay f32 or f64. Kernels widen what they read, compute as
// in f32, and round once to nearest even as they write.
type Kind string

// Forward operations and their gradients.
const (
	Embed     Kind = "embed"
	EmbedGrad Kind = "embed_grad"

	AddPos     Kind = "add_pos"
	AddPosGrad Kind = "add_pos_grad"

	Linear        Kind = "linear"
	LinearAct     Kind = "linear_act"
	LinearGradX   Kind = "linear_dx"
	LinearGradAct Kind = "linear_dact"
	LinearGradW   Kind = "linear_dw"
	LinearGradWB  Kind = "linear_dwb"
	BiasGrad      Kind = "bias_grad"

	LayerNorm     Kind = "layernorm"
	LayerNormGrad Kind = "layernorm_grad"
	RMSNorm       Kind = "rmsnorm"
	RMSNormGrad   Kind = "rmsnorm_grad"

	Activation     Kind = "act"
	ActivationGrad Kind = "act_grad"
	SwiGLU         Kind = "swiglu"
	SwiGLUGrad     Kind = "swiglu_grad"
	SoftCap        Kind = "softcap"
	SoftCapGrad    Kind = "softcap_grad"
	Softmax        Kind = "softmax"
	SoftmaxGrad    Kind = "softmax_grad"
	Rope           Kind = "rope"    // its derivative is itself with Inverse set
	Dropout        Kind = "dropout" // its derivative is itself on dy

	Attention     Kind = "attention"
	AttentionGrad Kind = "attention_grad"

	// Elementwise, and sums.
	Add     Kind = "add"
	Sub     Kind = "sub"
	Mul     Kind = "mul"
	Scale   Kind = "scale"
	Sum     Kind = "sum"
	SumGrad Kind = "sum_grad"

	Im2Col      Kind = "im2col" // a convolution is this and a linear
	Col2Im      Kind = "col2im"
	MaxPool     Kind = "maxpool"
	MaxPoolGrad Kind = "maxpool_grad"

	CrossEntropy     Kind = "cross_entropy"
	CrossEntropyGrad Kind = "cross_entropy_grad"
	LossSeed         Kind = "loss_seed" // where a backward begins that no loss's own gradient begins
	HeadLoss         Kind = "head_loss"
	HeadLossGrad     Kind = "head_loss_grad"

	// The loss of a head whose vocabulary is cut into slices (SliceAttr).
	HeadStats     Kind = "head_stats"
	HeadLSE       Kind = "head_lse"
	HeadSliceGrad Kind = "head_slice_grad"

	// Generation.
	SelectRow       Kind = "select_row"
	RopeAt          Kind = "rope_at"
	AttentionCached Kind = "attention_cached"
)

// Collectives. Reductions add in the order over ranks that GroupAttr says.
const (
	AllGather     Kind = "all_gather"
	ReduceScatter Kind = "reduce_scatter"
	AllReduce     Kind = "all_reduce"
	AllToAll      Kind = "all_to_all"
	Send          Kind = "send"
	Recv          Kind = "recv"
)

// Memory operations, and Join, which does nothing: its waits and its event join
// the streams.
const (
	Join     Kind = "join"
	Copy     Kind = "copy"
	Fill     Kind = "fill"
	Cast     Kind = "cast"      // into an accumulated dst, src is widened exactly
	SumParts Kind = "sum_parts" // of vectors as an all_to_all has left them
)

// Quantised values. A u8 buffer holds parts one behind the other, each its int8 codes
// and then its f32 scales (QuantAttr.Bytes): what moves together is one buffer.
// A code is x·127/a rounded to nearest even, a the largest magnitude of its block but
// at least QuantFloor, and the scale a/127; where a value of a block is not finite its
// scale is NaN. Rounded to 16 bits, values that are quantised again stay as they are.
const (
	Quantize      Kind = "quantize"
	Dequantize    Kind = "dequantize"
	DequantizeSum Kind = "dequantize_sum"
)

// Updates. Flat buffers follow the unit's segments; ShardAttr says which part a rank holds.
// g may be bf16 or f16. The operations of each rule are in its file of package zero.
const (
	SqSum           Kind = "sqsum"
	ClipCoef        Kind = "clip_coef"
	OverflowCheck   Kind = "overflow_check" // acc is summed over the ranks, so all of them skip a step or none
	LossScaleUpdate Kind = "loss_scale_update"
	ParamNorms      Kind = "param_norms"
	NewtonSchulz    Kind = "newtonschulz"
)

// PosAttr: rows repeat every Seq. Rows says which rows of the whole the operation's are, where it
// has a part of them: position 0 is that of the whole's first row.
type PosAttr struct {
	Seq  int64
	Rows SliceAttr
}

// LinearAttr describes a matrix product.
type LinearAttr struct {
	TransW bool    // w is (N,K)
	Act    ActKind // fused activation of the epilogue; ActNone for none
	// Int8 quantises both factors (Quantize): x or dy by row, w by column of the
	// product. Their products are summed exactly; an element is float32(sum)·scale of
	// the row·scale of the column + bias, each rounded in f32, then rounded once. Of
	// 16-bit linears and gradients of inputs alone.
	Int8 bool
}

// Int8Depth is the most products of two int8 codes whose sum surely fits an int32.
const Int8Depth = (1<<31 - 1) / (127 * 127)

// NormAttr is for layer norm and RMS norm. With PlusOne an RMS norm's gain is
// 1 + gamma, added in f32.
type NormAttr struct {
	Eps     float64
	PlusOne bool
}

// CapAttr bounds logits softly: Cap·tanh(x/Cap). Of a head's loss, which may have no
// attribute, it is of the logits before the softmax.
type CapAttr struct{ Cap float64 }

// HeadStatistics is the number of statistics of a row that HeadStats computes.
const HeadStatistics = 3

// SliceAttr is a slice of a dimension of Total elements that is cut into slices of Each
// elements; the last slice has what is left, at least one. On the rank with index i along mesh
// axis Axis it is slice i·PerRank + Index. Axis −1: the same slice on every rank. In another
// attribute the zero value is the whole.
type SliceAttr struct {
	Axis           int
	PerRank, Index int64
	Each, Total    int64
}

// Range returns the slice's elements [from, to) on the rank with the given index along each mesh
// axis.
func (a SliceAttr) Range(coord []int) (from, to int64) {
	n := a.Index
	if a.Axis >= 0 && a.PerRank > 0 {
		n += int64(coord[a.Axis]) * a.PerRank
	}
	return min(n*a.Each, a.Total), min((n+1)*a.Each, a.Total)
}

// ActKind names an elementwise activation.
type ActKind string

// Activations.
const (
	ActNone     ActKind = ""
	ActGELUTanh ActKind = "gelu_tanh"
	ActGELU     ActKind = "gelu"
	ActSiLU     ActKind = "silu"
	ActReLU     ActKind = "relu"
)

// ActAttr names the activation.
type ActAttr struct{ Act ActKind }

// RopeAttr describes rotary position embedding (Su et al., RoFormer), with
// Llama 3.1's frequency scaling where ScaleFactor is not 0.
type RopeAttr struct {
	Heads, HeadDim, Seq            int64
	Theta                          float64
	ScaleFactor, LowFreq, HighFreq float64
	OriginalPositions              int64
	Inverse                        bool
}

// AttentionAttr describes (grouped-query) attention over B·Seq rows.
type AttentionAttr struct {
	Batch, Seq, Heads, KVHeads, HeadDim int64
	Scale                               float64
	Causal, Packed                      bool
	Cap                                 float64 // of the scaled scores, softly (CapAttr); 0: none
	Window                              int64   // a causal row sees so many rows, itself the last; 0: all before
}

// DropoutAttr: Site tells apart the dropouts of one model; Elems is the number
// of elements of one sample (row of the batch). Part says which elements of the whole the
// operation's are, where it has a part of them: the key's sample is the whole's first.
type DropoutAttr struct {
	P     float64
	Site  int64
	Elems int64
	Part  SliceAttr
}

// ScaleAttr is a constant factor.
type ScaleAttr struct{ Factor float64 }

// ConvAttr is the geometry of a convolution or pooling over (B,H,W,C).
type ConvAttr struct{ KH, KW, Stride, Pad int64 }

// NewtonSchulzAttr is who computes: the rank with index Owner along mesh axis Axis, for
// Ranks ranks that have a matrix each to compute, and on the others the result is 0. Axis
// −1: every rank. Factor multiplies the result.
type NewtonSchulzAttr struct {
	Axis, Owner, Ranks int
	Factor             float64
}

// FillAttr is the value that fills (converted to the buffer's dtype).
type FillAttr struct{ Value float64 }

// SumOrder is the order in which a reduction adds the ranks' addends: a float sum's
// bits depend on it, so it is the program's to say, never a transport's.
type SumOrder uint8

// Orders of summation over the W ranks of a group, or over W parts. An accumulating
// sum adds the tree's result to what is there, and begins a sequential one with it.
const (
	// SumTree is a binary tree over the index: sum(0..n) = sum(0..p) + sum(p..n), p
	// the largest power of two below n.
	SumTree SumOrder = iota
	// SumSequential goes from left to right, ((0 + 1) + 2) + …: a sum that goes on
	// where it stopped has the bits of one that never did, however it was cut.
	SumSequential
	NumSumOrders
)

var sumOrderNames = [NumSumOrders]string{"tree", "sequential"}

func (o SumOrder) String() string { return name(sumOrderNames[:], int(o), "sum order") }

// GroupAttr is the mesh axis of a collective, −1 for all ranks, and of a reduction
// the order in which it adds.
type GroupAttr struct {
	Axis  int
	Order SumOrder
}

// PeerAttr is the mesh axis of a Send or Recv, and the indices along it of the rank that
// sends and of the one that receives.
type PeerAttr struct{ Axis, From, To int }

// SumPartsAttr is the order in which parts are added.
type SumPartsAttr struct{ Order SumOrder }

// ShardAttr says which part of a unit's flat parameter a buffer holds: elements
// [i·Len, (i+1)·Len) with i the rank's index along Axis, or all of it (Len is
// then the flat length) where Axis is −1.
//
// A chunk of that has Part, the elements that a rank holds, and Start, its first
// element among them: [i·Part+Start, +Len).
type ShardAttr struct {
	Unit int
	Axis int
	Len  int64

	Part, Start int64 // Part 0: Len, all that a rank holds

	// Once is 1 + a mesh axis along which ranks hold the same: of a sum over it only the first
	// rank's elements count. 0: all ranks' count.
	Once int
}

// From returns the first element in the unit's flat parameter, on the rank with
// the given index along Axis.
func (a ShardAttr) From(index int64) int64 {
	if a.Axis < 0 {
		return a.Start
	}
	if a.Part == 0 {
		return index*a.Len + a.Start
	}
	return index*a.Part + a.Start
}

// QuantAttr is the form of quantised values: a scale for every Block of them, Parts
// equal parts, each of whole blocks. Of a unit's flat buffer, or a part of it, Shard
// says which elements are no padding (QuantBlock divides their starts): padding has
// code 0. Shard.Len is 0 where the values are no unit's. A sum adds the parts in Order.
type QuantAttr struct {
	Block, Parts int64
	Shard        ShardAttr
	Order        SumOrder
}

// Bytes returns the size of quantised values, n in each part.
func (a QuantAttr) Bytes(n int64) int64 {
	return a.Parts * (roundUp(n, F32.Size()) + n/max(a.Block, 1)*F32.Size())
}

// QuantFloor is the least magnitude that a block's scale stands for: a block of zeros
// has a scale too.
const QuantFloor = 0x1p-100

// ClipAttr is the largest global gradient norm; 0 turns clipping off.
type ClipAttr struct{ Max float64 }

// LossScaleAttr is how the loss scale moves (Micikevicius et al., Mixed Precision
// Training, ICLR 2018): × Growth after Interval steps in a row without overflow,
// × Backoff on overflow, never below Floor.
type LossScaleAttr struct {
	Growth, Backoff, Floor float64
	Interval               int64
	Hysteresis             int64 // overflows in a row that it moves after; 0 is 1
}

// UpdateAttr describes an optimizer's step over a shard.
type UpdateAttr struct {
	Shard                           ShardAttr
	Beta1, Beta2, Eps, Decay, Trust float64 // Decay applies to segments whose Param.Decay is set
	Nesterov, Clip                  bool    // Clip: at most the global rate
	// Stochastic rounds what rests in bf16 up or down with probabilities that make the
	// mean exact (p and the states in bf16, and no low). The bits are a function of
	// HyperSeed, the parameter's name, its element and HyperUpdate (num.Rounding).
	Stochastic bool
	// AdaptAll takes the norms of every parameter, not only of those with decay.
	AdaptAll bool
}

// Unadapted is LARS's local rate over the global one where there is no norm to
// adapt it by: of a parameter without decay (biases, norms) unless AdaptAll, and
// of one whose weights or gradients are all zero. It is the trust coefficient,
// as if both norms were equal: at the rates that LARS is run with, the global
// rate itself is thousands of times what a weight matrix gets. The papers' letter
// (AdaptAll) and LARC, whose global rate is a ceiling, take the global rate.
func (a UpdateAttr) Unadapted() float64 {
	if a.AdaptAll || a.Clip {
		return 1
	}
	return a.Trust
}
