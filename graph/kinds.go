package graph

// Kind names an operation. Every kind has an entry in the kind table (Info). Doc describes the
// computation, In and Out the operands with their shapes. There N is the number of tokens (rows ·
// T) and C a width.
//
// In mixed precision the values of an operation (Operand.Float: ComputeFloat) are all bf16 or all
// f16 instead of f32. Gradients of parameters (GradFloat) have that type or f32. Statistics (mean,
// rstd, lse), logits of a cross-entropy, losses and optimizer states stay f32 or f64. Kernels widen
// 16-bit inputs, compute in f32, and round once to nearest even on writing.
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
	Rope           Kind = "rope"    // its derivative is Rope with Inverse set
	Dropout        Kind = "dropout" // its derivative is the same operation applied to dy

	Attention     Kind = "attention"
	AttentionGrad Kind = "attention_grad"

	// Elementwise, and sums.
	Add     Kind = "add"
	Sub     Kind = "sub"
	Mul     Kind = "mul"
	Scale   Kind = "scale"
	Sum     Kind = "sum"
	SumGrad Kind = "sum_grad"

	Im2Col      Kind = "im2col" // followed by a linear it computes a convolution
	Col2Im      Kind = "col2im"
	MaxPool     Kind = "maxpool"
	MaxPoolGrad Kind = "maxpool_grad"

	CrossEntropy     Kind = "cross_entropy"
	CrossEntropyGrad Kind = "cross_entropy_grad"
	LossSeed         Kind = "loss_seed" // starts a backward where no loss operation computes its own gradient
	HeadLoss         Kind = "head_loss"
	HeadLossGrad     Kind = "head_loss_grad"

	// Loss of a head whose vocabulary is divided into slices (SliceAttr).
	HeadStats     Kind = "head_stats"
	HeadLSE       Kind = "head_lse"
	HeadSliceGrad Kind = "head_slice_grad"

	// Generation.
	SelectRow       Kind = "select_row"
	RopeAt          Kind = "rope_at"
	AttentionCached Kind = "attention_cached"
)

// Collectives. GroupAttr gives the order in which reductions add the ranks' values.
const (
	AllGather     Kind = "all_gather"
	ReduceScatter Kind = "reduce_scatter"
	AllReduce     Kind = "all_reduce"
	AllToAll      Kind = "all_to_all"
	Send          Kind = "send"
	Recv          Kind = "recv"
)

// Memory operations, and Join. Join computes nothing: its waits and its event join the streams.
const (
	Join     Kind = "join"
	Copy     Kind = "copy"
	Fill     Kind = "fill"
	Cast     Kind = "cast"      // into an accumulated dst, src is widened exactly
	SumParts Kind = "sum_parts" // of vectors in the layout that an all_to_all leaves
)

// Quantised values. A u8 buffer holds parts in sequence. Each part is its int8 codes followed by
// its f32 scales (QuantAttr.Bytes), so one transfer moves both. A code is x·127/a rounded to
// nearest even, where a is the largest magnitude of its block but at least QuantFloor. The scale is
// a/127, or NaN if a value of the block is not finite. Values that were quantised and then rounded
// to 16 bits do not change if they are quantised again.
const (
	Quantize      Kind = "quantize"
	Dequantize    Kind = "dequantize"
	DequantizeSum Kind = "dequantize_sum"
)

// Updates. Flat buffers follow the unit's segments; ShardAttr gives a rank's part. g may be bf16 or
// f16. The operations of each rule are in its file of package zero.
const (
	SqSum           Kind = "sqsum"
	ClipCoef        Kind = "clip_coef"
	OverflowCheck   Kind = "overflow_check" // acc is summed over the ranks, so all ranks skip a step or none does
	LossScaleUpdate Kind = "loss_scale_update"
	ParamNorms      Kind = "param_norms"
	NewtonSchulz    Kind = "newtonschulz"
)

// PosAttr: the position of row n is n mod Seq. If the operation has only a part of the rows, Rows
// says which part, and positions count from the first row of all.
type PosAttr struct {
	Seq  int64
	Rows SliceAttr
}

// LinearAttr describes a matrix product.
type LinearAttr struct {
	TransW bool    // w is (N,K)
	Act    ActKind // fused activation of the epilogue; ActNone for none
	// Int8 quantises both factors (Quantize): x or dy by row, w by column of the product. Their
	// products are summed exactly. An element is float32(sum)·(scale of the row)·(scale of the
	// column) + bias, each step rounded in f32, and then rounded once to its type. It is allowed
	// only for 16-bit linears and gradients of inputs.
	Int8 bool
}

// Int8Depth is the largest number of products of two int8 codes whose sum always fits an int32.
const Int8Depth = (1<<31 - 1) / (127 * 127)

// NormAttr is for layer norm and RMS norm. With PlusOne an RMS norm's gain is
// 1 + gamma, added in f32.
type NormAttr struct {
	Eps     float64
	PlusOne bool
}

// CapAttr bounds logits softly: Cap·tanh(x/Cap). A head's loss may have no attribute; if it has
// one, the cap applies to the logits before the softmax.
type CapAttr struct{ Cap float64 }

// HeadStatistics is the number of statistics of a row that HeadStats computes.
const HeadStatistics = 3

// SliceAttr selects a slice of a dimension of Total elements. Slices have Each elements; the last
// one has the remainder, at least one. On the rank with index i along mesh axis Axis it is slice
// i·PerRank + Index. Axis −1: the same slice on every rank. The zero value inside another attribute
// selects all elements.
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

// ActAttr selects the activation.
type ActAttr struct{ Act ActKind }

// RopeAttr describes rotary position embedding (Su et al., RoFormer), with Llama 3.1's frequency
// scaling if ScaleFactor is not 0.
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
	Cap                                 float64 // soft cap of the scaled scores (CapAttr); 0: none
	Window                              int64   // number of rows that a causal row sees, including itself; 0: all before
}

// DropoutAttr: Site distinguishes the dropouts of one model; Elems is the number of elements of one
// sample (row of the batch). If the operation has only a part of the batch's elements, Part says
// which. The key's sample is the first one of the complete batch.
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

// NewtonSchulzAttr selects the rank that computes: the one with index Owner along mesh axis Axis.
// Ranks is the number of ranks, each of which computes one matrix. On the other ranks the result is
// 0. Axis −1: every rank computes. Factor multiplies the result.
type NewtonSchulzAttr struct {
	Axis, Owner, Ranks int
	Factor             float64
}

// FillAttr is the fill value (converted to the buffer's dtype).
type FillAttr struct{ Value float64 }

// SumOrder is the order in which a reduction adds the ranks' values. A float sum's bits depend on
// it, so the program chooses it, never the transport.
type SumOrder uint8

// Orders of summation over the W ranks of a group, or over W parts. An accumulating tree sum adds
// its result to the old contents. An accumulating sequential sum starts with the old contents.
const (
	// SumTree is a binary tree over the index: sum(0..n) = sum(0..p) + sum(p..n), p
	// the largest power of two below n.
	SumTree SumOrder = iota
	// SumSequential adds from left to right, ((0 + 1) + 2) + …. A sum that is interrupted and
	// continued has the same bits as an uninterrupted one.
	SumSequential
	NumSumOrders
)

var sumOrderNames = [NumSumOrders]string{"tree", "sequential"}

func (o SumOrder) String() string { return name(sumOrderNames[:], int(o), "sum order") }

// GroupAttr is the mesh axis of a collective, −1 for all ranks. For a reduction it also gives the
// order in which it adds.
type GroupAttr struct {
	Axis  int
	Order SumOrder
}

// PeerAttr is the mesh axis of a Send or Recv, and the indices along it of the sending and the
// receiving rank.
type PeerAttr struct{ Axis, From, To int }

// SumPartsAttr is the order in which SumParts adds.
type SumPartsAttr struct{ Order SumOrder }

// ShardAttr describes the part of a unit's flat parameter in a buffer: elements [i·Len, (i+1)·Len),
// where i is the rank's index along Axis. With Axis −1 the buffer has all elements, and Len is the
// flat length.
//
// A chunk of such a part sets Part, the number of elements that a rank holds, and Start, the
// chunk's first element among them: [i·Part+Start, +Len).
type ShardAttr struct {
	Unit int
	Axis int
	Len  int64

	Part, Start int64 // Part 0: Len, all elements of the rank

	// Once is 1 + a mesh axis along which ranks hold the same values: in a sum over that axis only
	// the first rank's elements count. 0: all ranks' elements count.
	Once int
}

// From returns the first element in the unit's flat parameter, on the rank with the given index
// along Axis.
func (a ShardAttr) From(index int64) int64 {
	if a.Axis < 0 {
		return a.Start
	}
	if a.Part == 0 {
		return index*a.Len + a.Start
	}
	return index*a.Part + a.Start
}

// QuantAttr describes quantised values: a scale for every Block of them, Parts equal parts, each of
// complete blocks. For a unit's flat buffer or a part of it, Shard says which elements are not
// padding (QuantBlock divides their starts); padding has code 0. Shard.Len is 0 if the values do
// not belong to a unit. A sum adds the parts in Order.
type QuantAttr struct {
	Block, Parts int64
	Shard        ShardAttr
	Order        SumOrder
}

// Bytes returns the size of quantised values with n values in each part.
func (a QuantAttr) Bytes(n int64) int64 {
	return a.Parts * (roundUp(n, F32.Size()) + n/max(a.Block, 1)*F32.Size())
}

// QuantFloor is the smallest magnitude that a scale represents, so that a block of zeros has a
// valid scale.
const QuantFloor = 0x1p-100

// ClipAttr is the largest global gradient norm; 0 turns clipping off.
type ClipAttr struct{ Max float64 }

// LossScaleAttr controls the loss scale (Micikevicius et al., Mixed Precision Training, ICLR 2018):
// × Growth after Interval steps in a row without overflow, × Backoff on overflow, never below
// Floor.
type LossScaleAttr struct {
	Growth, Backoff, Floor float64
	Interval               int64
	Hysteresis             int64 // number of overflows in a row before × Backoff; 0 means 1
}

// UpdateAttr describes an optimizer's step over a shard.
type UpdateAttr struct {
	Shard                           ShardAttr
	Beta1, Beta2, Eps, Decay, Trust float64 // Decay applies to segments whose Param.Decay is set
	Nesterov, Clip                  bool    // Clip: the local rate is at most the global one
	// Stochastic rounds values stored in bf16 up or down with probabilities that make the mean
	// exact (p and the states in bf16, and no low). The bits are a function of HyperSeed, the
	// parameter's name, its element and HyperUpdate (num.Rounding).
	Stochastic bool
	// AdaptAll uses the norms of every parameter, not only of those with decay.
	AdaptAll bool
}

// Unadapted returns LARS's local rate divided by the global one for parameters without usable
// norms: those without decay (biases, norms) unless AdaptAll, and those whose weights or gradients
// are all zero. It returns the trust coefficient, as if both norms were equal: at the rates used
// with LARS, the global rate itself is thousands of times the rate of a weight matrix. The papers'
// literal rule (AdaptAll) and LARC, whose global rate is a ceiling, use the global rate.
func (a UpdateAttr) Unadapted() float64 {
	if a.AdaptAll || a.Clip {
		return 1
	}
	return a.Trust
}
