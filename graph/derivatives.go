package graph

// derivatives has, by kind, the function that adds the backward operations. It is not a field
// of Info because these functions use the kind table: initialisation would be cyclic.
var derivatives = map[Kind]func(d *differ){
	Activation: func(d *differ) {
		d.intoOver(0, "dx", d.dy(0), ActivationGrad, d.op.Attr, d.dy(0), d.in(0))
	},
	SwiGLU: func(d *differ) {
		// The kernel writes both gradients; an unneeded one goes to scratch.
		gate, up := d.openWrite(0), d.openWrite(1)
		if gate.none() && up.none() {
			return
		}
		for _, s := range []*slot{&gate, &up} {
			if s.none() {
				s.out = d.scratch(d.in(0), "unused", NoBuf)
			}
		}
		d.emit("dx", SwiGLUGrad, nil, []BufID{d.dy(0), d.in(0), d.in(1)}, gate.out, up.out)
		d.close("dgate", gate)
		d.close("dup", up)
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
		dx, dgamma, dbeta := d.open(0), d.open(1), d.open(2)
		if dx.none() && dgamma.none() && dbeta.none() {
			return
		}
		d.emit("dx", LayerNormGrad, d.op.Attr,
			[]BufID{d.dy(0), d.in(0), d.in(1), d.out(1), d.out(2)}, dx.out, dgamma.out, dbeta.out)
		d.close("dx", dx)
		d.close("dgamma", dgamma)
		d.close("dbeta", dbeta)
	},
	RMSNorm: func(d *differ) {
		dx, dgamma := d.open(0), d.open(1)
		if dx.none() && dgamma.none() {
			return
		}
		d.emit("dx", RMSNormGrad, d.op.Attr,
			[]BufID{d.dy(0), d.in(0), d.in(1), d.out(1)}, dx.out, dgamma.out)
		d.close("dx", dx)
		d.close("dgamma", dgamma)
	},

	Attention: deriveAttention,

	Im2Col:  func(d *differ) { d.into(0, "dx", Col2Im, d.op.Attr, d.dy(0)) },
	MaxPool: func(d *differ) { d.into(0, "dx", MaxPoolGrad, d.op.Attr, d.dy(0), d.in(0)) },

	CrossEntropy: deriveCrossEntropy,
	HeadLoss:     func(*differ) {}, // HeadLossGrad has replaced the forward operation already
}
