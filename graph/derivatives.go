package graph

// derivatives has, by kind, the function that adds the backward operations. It is not a field
// of Info because these functions use the kind table: initialisation would be cyclic.
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
