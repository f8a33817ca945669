package graph

import "slices"

// derivatives maps a kind to the function that adds its backward operations. It is not a field of
// Info because these functions use the kind table: initialisation would be cyclic.
var derivatives = map[Kind]func(d *differ){
	Activation: func(d *differ) {
		d.intoOver(0, "dx", d.dy(0), ActivationGrad, d.op.Attr, d.dy(0), d.in(0))
	},
	SwiGLU: func(d *differ) {
		if g := d.gradients(Op{Kind: SwiGLUGrad}, 0, 1); g != nil {
			g.add("dx", "", []BufID{d.dy(0), d.in(0), d.in(1)})
		}
	},
	SoftCap: func(d *differ) {
		d.intoOver(0, "dx", d.dy(0), SoftCapGrad, d.op.Attr, d.dy(0), d.out(0))
	},
	Softmax: func(d *differ) {
		d.into(0, "dx", SoftmaxGrad, nil, d.dy(0), d.out(0))
	},
	Rope: func(d *differ) {
		a := d.op.Attr.(RopeAttr)
		a.Inverse = !a.Inverse
		d.writeOver(0, "dx", d.dy(0), Rope, a, append([]BufID{d.dy(0)}, d.op.In[1:]...)...)
	},
	Dropout: func(d *differ) { d.writeOver(0, "dx", d.dy(0), Dropout, d.op.Attr, d.dy(0), d.in(1)) },
	Add: func(d *differ) {
		d.identity(0, "da", d.dy(0), false)
		d.identity(1, "db", d.dy(0), true)
	},
	Sub: func(d *differ) {
		d.identity(0, "da", d.dy(0), false)
		d.intoOver(1, "db", d.dy(0), Scale, ScaleAttr{-1}, d.dy(0))
	},
	Mul: func(d *differ) {
		d.into(0, "da", Mul, nil, d.dy(0), d.in(1))
		d.intoOver(1, "db", d.dy(0), Mul, nil, d.dy(0), d.in(0))
	},
	Scale: func(d *differ) { d.intoOver(0, "dx", d.dy(0), Scale, d.op.Attr, d.dy(0)) },
	Sum:   func(d *differ) { d.into(0, "dx", SumGrad, nil, d.dy(0)) },

	Embed:     deriveEmbed,
	AddPos:    deriveAddPos,
	Linear:    deriveLinear,
	LinearAct: deriveLinear,

	LayerNorm: func(d *differ) {
		if g := d.gradients(Op{Kind: LayerNormGrad, Attr: d.op.Attr}, 0, 1, 2); g != nil {
			g.add("dx", "", []BufID{d.dy(0), d.in(0), d.in(1), d.out(1), d.out(2)})
		}
	},
	RMSNorm: func(d *differ) {
		if g := d.gradients(Op{Kind: RMSNormGrad, Attr: d.op.Attr}, 0, 1); g != nil {
			g.add("dx", "", []BufID{d.dy(0), d.in(0), d.in(1), d.out(1)})
		}
	},

	Attention: deriveAttention,

	Im2Col:  func(d *differ) { d.into(0, "dx", Col2Im, d.op.Attr, d.dy(0)) },
	MaxPool: func(d *differ) { d.into(0, "dx", MaxPoolGrad, d.op.Attr, d.dy(0), d.in(0)) },

	CrossEntropy: deriveCrossEntropy,
	HeadLoss:     func(*differ) {}, // HeadLossGrad has replaced the forward operation already
}

// Differentiable says whether gradients can flow through the kind.
func (i *Info) Differentiable() bool { return i.derivative() != nil }

// derivative returns the function that adds the backward operations, nil for none.
func (i *Info) derivative() func(d *differ) {
	if i.derive != nil {
		return i.derive
	}
	return derivatives[i.Kind]
}

func deriveEmbed(d *differ) {
	d.into(1, "dw", EmbedGrad, d.op.Attr, d.in(0), d.dy(0))
}

func deriveAddPos(d *differ) {
	d.into(1, "dpos", AddPosGrad, d.op.Attr, append([]BufID{d.dy(0)}, d.op.In[2:]...)...)
	d.identity(0, "dx", d.dy(0), true)
}

// deriveLinear adds the weight's gradient before the input's: dw is then the last use of x, and dx
// can reuse x's memory.
func deriveLinear(d *differ) {
	a := d.op.Attr.(LinearAttr)
	dy := d.dy(0)
	if a.Act != ActNone {
		if d.out(1) == NoBuf {
			d.failf("its activation was fused without keeping pre; differentiate before fusing")
			return
		}
		g := d.scratch(d.out(1), "dpre", dy)
		d.emit("dpre", ActivationGrad, ActAttr{a.Act}, []BufID{dy, d.out(1)}, g)
		dy = g.Buf
	}
	attr := LinearAttr{TransW: a.TransW}
	d.into(2, "db", BiasGrad, nil, dy)
	d.into(1, "dw", LinearGradW, attr, d.in(0), dy)
	d.into(0, "dx", LinearGradX, attr, dy, d.in(1))
}

func deriveAttention(d *differ) {
	by := []int{0, 1, 2}
	if d.op.Attr.(AttentionAttr).Packed {
		by = by[:1]
	}
	if g := d.gradients(Op{Kind: AttentionGrad, Attr: d.op.Attr}, by...); g != nil {
		own := []BufID{d.out(0), d.out(1), d.dy(0)}
		g.add("dx", "", slices.Concat(d.op.In[:len(by)], own, d.op.In[len(by):]))
	}
}

// deriveCrossEntropy overwrites the logits with their gradient if nothing reads them later:
// with a large vocabulary they are the largest activation.
func deriveCrossEntropy(d *differ) {
	if !d.needs(0) {
		return
	}
	ins := []BufID{d.in(0), d.in(1), d.out(1), d.hyper()}
	s := d.openInto(0, d.reusable(0))
	d.emit("dx", CrossEntropyGrad, nil, ins, s.out)
	d.close("dx", s)
}
