//go:build linux

package vec

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/kernels/cpu/exact"
)

// Wrong arguments are refused with an error that names kernel, field and dimension. Nothing is
// written.
func TestRefusals(t *testing.T) {
	f := func(n int) []float32 { return make([]float32, n) }
	win := Window{B: 1, H: 3, W: 3, C: 2, KH: 2, KW: 2, Stride: 1}
	m := Moments{P: f(4), G: f(4), M: f(4), V: f(4), AdamStep: AdamStep{BC1: 1, BC2: 1}}
	short := m
	short.V = f(3)
	zero := m
	zero.BC2 = 0
	for _, c := range []struct {
		k    runner
		want string
	}{
		{&Binary[float32]{Op: Add, A: f(4), B: f(3), Y: f(4)}, "add: B has 3 elements, want that of A = 4"},
		{&Binary[float32]{Op: Add, A: f(4), B: f(4), Y: f(5)}, "add: Y has 5 elements, want that of A = 4"},
		{&Binary[float32]{Op: Sub, A: f(4), B: f(4), Y: f(3)}, "sub: Y has 3"},
		{&Binary[float32]{Op: Mul, A: f(4), B: f(4), Y: f(3)}, "mul: Y has 3"},
		{&Scale[float32]{X: f(4), Y: f(3)}, "scale: Y has 3"},
		{&Activation[float32]{Act: 9}, "activation: Act is 9, want one of the activations, below 4"},
		{&Activation[float32]{X: f(2), Y: f(1)}, "activation: Y has 1"},
		{&ActivationGrad[float32]{Act: 7}, "activation gradient: Act is 7"},
		{&ActivationGrad[float32]{X: f(2), DY: f(2), DX: f(1)}, "activation gradient: DX has 1"},
		{&SwiGLU[float32]{Gate: f(2), Up: f(3), Y: f(2)}, "swiglu: Up has 3"},
		{&SwiGLUGrad[float32]{Gate: f(2), Up: f(2), DY: f(2), DGate: f(2), DUp: f(1)}, "swiglu gradient: DUp has 1"},
		{&LayerNorm[float32]{N: 2, C: 3, X: f(6), Gamma: f(2)}, "layernorm: Gamma has 2 elements, want C = 3"},
		{&LayerNorm[float32]{N: 2, C: 3, X: f(7)}, "layernorm: X has 7 elements, want (N, C) = (2, 3)"},
		{&LayerNorm[float32]{N: -1, C: 3}, "layernorm: N is -1, want at least 0"},
		{&LayerNorm[float32]{N: 2}, "layernorm: C is 0, want at least 1"},
		{&LayerNorm[float32]{N: math.MaxInt, C: math.MaxInt, X: f(1)}, "layernorm: X has 1 elements, want (N, C)"},
		{&LayerNormGrad[float32]{N: 1, C: 2, DY: f(2), X: f(2), Gamma: f(2), Mean: f(1), Rstd: f(1), DX: f(1)}, "layernorm gradient: DX has 1 elements, want (N, C) = (1, 2)"},
		{&LayerNormGrad[float32]{N: 1, C: 2, DY: f(2), X: f(2), Gamma: f(2), Mean: f(2)}, "layernorm gradient: Mean has 2 elements, want N = 1"},
		{&RMSNorm[float32]{N: 1, C: 2, X: f(2), Gamma: f(2), Y: f(2)}, "rmsnorm: Rstd has 0 elements, want N = 1"},
		{&RMSNormGrad[float32]{N: 1, C: 2, DY: f(2), X: f(2), Gamma: f(2), Rstd: f(1), DGamma: f(3)}, "rmsnorm gradient: DGamma has 3"},
		{&Softmax[float32]{N: 1, C: 2, X: f(2), Y: f(3)}, "softmax: Y has 3"},
		{&SoftmaxGrad[float32]{N: 1, C: 2, DY: f(2), Y: f(2), DX: f(3)}, "softmax gradient: DX has 3"},
		{&CrossEntropy[float32]{N: 1, V: 2, Logits: f(2), Targets: []int32{2}, LSE: f(1), Loss: make([]float64, 1)}, "cross entropy: Targets[0] is 2, want -1 or in [0, V = 2)"},
		{&CrossEntropy[float32]{N: 1, V: 2, Logits: f(2), Targets: []int32{-2}, LSE: f(1), Loss: make([]float64, 1)}, "cross entropy: Targets[0] is -2"},
		{&CrossEntropy[float32]{N: 1, V: 2, Logits: f(2), LSE: f(1), Loss: make([]float64, 1)}, "cross entropy: Targets has 0 elements, want N = 1"},
		{&CrossEntropy[float32]{N: 1, V: 2, Logits: f(2), Targets: []int32{1}, LSE: f(1)}, "cross entropy: Loss has 0 elements, want 1 = 1"},
		{&CrossEntropy[float32]{N: 1, V: 2, Logits: f(2), Targets: []int32{1}, LSE: f(1), Loss: make([]float64, 1), DLogits: f(2)}, "cross entropy: RowLoss has 0"},
		{&CrossEntropyGrad[float32]{N: 1, V: 2, Logits: f(2), Targets: []int32{5}, LSE: f(1), DLogits: f(2)}, "cross entropy gradient: Targets[0] is 5"},
		{&Sum[float32]{X: f(4), Y: make([]float64, 1)}, "sum: Work has 0 elements, want SumWork(len(X)) = 1"},
		{&SqSum{X: f(4), Acc: make([]int64, 3)}, "sqsum: Acc has 3 elements, want exact.Limbs = 72"},
		{&ColumnSum[float32]{N: 2, C: 2, X: f(3), Y: f(2)}, "column sum: X has 3 elements, want (N, C) = (2, 2)"},
		{&AddPos[float32]{N: 2, C: 2, Seq: 2, X: f(4), Pos: f(3), Y: f(4)}, "add positions: Pos has 3 elements, want (P, C) with C = 2 and P at least Seq = 2"},
		{&AddPos[float32]{N: 2, C: 2, X: f(4), Pos: f(4), Y: f(4)}, "add positions: Seq is 0, want at least 1"},
		{&AddPosGrad[float32]{N: 2, C: 2, Seq: 2, DY: f(4), DPos: f(2)}, "add positions gradient: DPos has 2"},
		{&Embed[float32]{N: 2, V: 3, C: 1, Tokens: []int32{0, 3}, Table: f(3), Y: f(2)}, "embed: Tokens[1] is 3, want in [0, V = 3)"},
		{&Embed[float32]{N: 2, V: 3, C: 1, Tokens: []int32{0, -1}, Table: f(3), Y: f(2)}, "embed: Tokens[1] is -1"},
		{&EmbedGrad[float32]{N: 1, V: 3, C: 1, Tokens: []int32{0}, DY: f(1), DTable: f(2)}, "embed gradient: DTable has 2 elements, want (V, C) = (3, 1)"},
		{&RopeTable[float32]{Seq: 1, D: 3, Table: f(3), Theta: 1}, "rope table: D is 3, want even and at least 2"},
		{&RopeTable[float32]{Seq: 1, D: 2, Table: f(2)}, "rope table: Theta is 0, want above 0"},
		{&RopeTable[float32]{Seq: 1, D: 2, Table: f(2), Theta: 1, Factor: 8}, "rope table: scaling has Factor 8"},
		{&Rope[float32]{N: 1, Heads: 2, D: 2, Seq: 1, X: f(4), Y: f(3), Table: f(2)}, "rope: Y has 3 elements, want (N, Heads, D, 1) = (1, 2, 2, 1)"},
		{&Dropout[float32]{X: f(4), Y: f(4), Elems: 3, First: -1}, "dropout: First is -1, want at least 0"},
		{&Dropout[float32]{X: f(4), Y: f(4), Elems: 4, P: 1}, "dropout: P is 1, want in [0, 1)"},
		{&Dropout[float32]{X: f(4), Y: f(4), Elems: 4, P: math.NaN()}, "dropout: P is NaN"},
		{&Dropout[float32]{X: f(4), Y: f(4)}, "dropout: Elems is 0"},
		{&Im2Col[float32]{Window: win, X: f(17), Cols: f(32)}, "im2col: X has 17 elements, want (B, H, W, C) = (1, 3, 3, 2)"},
		{&Im2Col[float32]{Window: Window{B: 1, H: 1, W: 1, C: 1, KH: 2, KW: 1, Stride: 1}}, "im2col: window (KH, KW) = (2, 1) exceeds the padded image (1, 1)"},
		{&Im2Col[float32]{Window: Window{B: 1, H: 1, W: 1, C: 1, KH: 1, KW: 1}}, "im2col: Stride is 0"},
		{&Col2Im[float32]{Window: win, DX: f(18), DCols: f(31)}, "col2im: DCols has 31"},
		{&MaxPool[float32]{Window: win, X: f(18), Y: f(7)}, "maxpool: Y has 7 elements, want (B, OutH, OutW, C) = (1, 2, 2, 2)"},
		{&MaxPool[float32]{Window: Window{B: 1, H: 3, W: 3, C: 1, KH: 2, KW: 2, Stride: 1, Pad: 2}}, "maxpool: Pad is 2, want below KH = 2 and KW = 2"},
		{&MaxPoolGrad[float32]{Window: win, X: f(18), DX: f(18), DY: f(9)}, "maxpool gradient: DY has 9"},
		{&AdamW{Moments: short}, "adamw: V has 3 elements, want that of P = 4"},
		{&AdamW{Moments: zero}, "adamw: bias corrections BC1 = 1, BC2 = 0, want above 0"},
		{&AdamW{Moments: m, Low: make([]uint16, 4)}, "adamw: LowAs is 0, want BF16 (1) or F16 (2)"},
		{&AdamW{Moments: m, Low: make([]uint16, 3), LowAs: F16}, "adamw: Low has 3"},
		{&LAMBDirection{Moments: short}, "lamb direction: V has 3"},
		{&LAMBApply{P: f(2), U: f(1)}, "lamb apply: U has 1"},
		{&Momentum{P: f(2), G: f(1)}, "momentum update: G has 1"},
		{&Momentum{P: f(2), G: f(2), B: f(1)}, "momentum update: B has 1"},
		{&Momentum{P: f(2), G: f(2), Momentum: 0.9}, "momentum update: B is nil and Momentum is 0.9, want a buffer or 0"},
		{&SumTree{Dst: f(2)}, "sum over ranks: 0 buffers, want from 1 to 65536"},
		{&SumTree{Dst: f(2), Srcs: [][]float32{f(2), f(3)}}, "sum over ranks: Srcs[1] has 3 elements, want that of Dst = 2"},
		{&SumTreeAll{}, "sum over ranks: 0 buffers"},
		{&SumTreeAll{Bufs: [][]float32{f(2), f(3)}}, "sum over ranks: Bufs[1] has 3 elements, want that of Bufs[0] = 2"},
		{&Narrow{Src: f(1), Dst: make([]uint16, 1)}, "narrow: To is 0, want BF16 (1) or F16 (2)"},
		{&Widen{From: BF16, Src: make([]uint16, 2), Dst: f(1)}, "widen: Dst has 1"},
	} {
		err := c.k.Run(nil)
		require.ErrorContains(t, err, c.want)
	}
	require.Equal(t, 72, exact.Limbs)
}
