package graph

import "strconv"

// Operands of the updates.
var (
	coefIn  = in("coef", "(1)").typ(isF32)
	hyperIn = in("hyper", "(NumHyper)").typ(isF64)
	gradIn  = in("g", "(Len)").typ(isFloat).per(1) // in the compute type; p and the moments are f32
	lowOut  = out("low", "(Len)").typ(isHalf).opt().per(1)
	norms   = Operand{Name: "norms", Shape: "(2·params·Limbs)", Types: isI64}
)

// moment is a state that may be narrow.
func moment(name string) Operand { return StateOut(name).typ([]DType{F32, U8, BF16}) }

// scales are the scales of a narrow state.
func scales(of string) Operand {
	return Operand{Name: of + "_scales", Shape: "(Len/256)", Types: isF32, Modes: modeRW, Per: QuantBlock, ScaleOf: of, Optional: true}
}

var updateKinds = []*Info{
	{
		Kind: SqSum,
		Doc:  "acc += the sum of squares of g over the rank's segments, exact (a superaccumulator of i64 limbs), so independent of how parameters are split; g (Len).",
		In:   []Operand{gradIn},
		Out:  []Operand{{Name: "acc", Shape: "(Limbs)", Types: isI64, Modes: modeA}},
		Attr: ShardAttr{},
		check: func(c *checker) {
			a := c.op.Attr.(ShardAttr)
			c.shard(a)
			c.vector(c.in(0), a.Len, "the shard's Len")
		},
		flops: func(c *checker) int64 { return 2 * c.in(0).elems() },
	},
	{
		Kind: ClipCoef,
		Doc:  "norm = sqrt(acc); coef = 1/LossScale · min(1, Max/(norm + 1e-6)), without the minimum where Max is 0; acc i64 (Limbs), hyper f64, coef f32 (1), norm f64 (1).",
		In:   []Operand{{Name: "acc", Shape: "(Limbs)", Types: isI64}, hyperIn},
		Out:  []Operand{out("coef", "(1)").typ(isF32), out("norm", "(1)").typ(isF64)},
		Attr: ClipAttr{},
		check: func(c *checker) {
			c.vector(c.in(1), NumHyper, "the Hyper slots")
			c.vector(c.out(0), 1, "a scalar")
			c.vector(c.out(1), 1, "a scalar")
			if a := c.op.Attr.(ClipAttr); c.err == nil && !(a.Max >= 0) {
				c.failf("Max is %g, want 0 or more", a.Max)
			}
		},
	},
	{
		Kind: OverflowCheck,
		Doc:  "flag = 1 where acc, the exact sum of squares of all gradients over all ranks, is not finite, else 0; acc i64 (Limbs), flag i32 (1).",
		In:   []Operand{{Name: "acc", Shape: "(Limbs)", Types: isI64}},
		Out:  []Operand{{Name: "flag", Shape: "(1)", Types: isI32, Modes: modeW}},
		check: func(c *checker) {
			c.vector(c.out(0), 1, "a scalar")
		},
	},
	{
		Kind: LossScaleUpdate,
		Doc: "With flag ≠ 0, Hysteresis times in a row: scale = max(Floor, scale·Backoff), clean = 0; else clean += 1, and at Interval scale ·= Growth, clean = 0; " +
			"flag i32 (1), state f64 (NumScale): scale, clean.",
		In:   []Operand{{Name: "flag", Shape: "(1)", Types: isI32}},
		Out:  []Operand{{Name: "state", Shape: "(NumScale)", Types: isF64, Modes: modeRW}},
		Attr: LossScaleAttr{},
		check: func(c *checker) {
			c.vector(c.in(0), 1, "a scalar")
			c.vector(c.out(0), NumScale, "the scale's slots")
			a := c.op.Attr.(LossScaleAttr)
			c.positive("Interval", a.Interval)
			c.within("Hysteresis", max(a.Hysteresis, 1), 1<<30)
			if a.Hysteresis < 0 {
				c.failf("Hysteresis is %d, want at least 0", a.Hysteresis)
			}
			if c.err == nil && !(a.Growth >= 1 && a.Backoff > 0 && a.Backoff <= 1 && a.Floor > 0) {
				c.failf("Growth %g, Backoff %g, Floor %g: want at least 1, in (0, 1] and above 0", a.Growth, a.Backoff, a.Floor)
			}
		},
	},
	{
		Kind: AdamW,
		Doc: "AdamW (Loshchilov & Hutter 2019) on coef·g; g, p, m, v (Len). low, of every rule: the new p rounded to 16 bits (Len). " +
			"m and v may be u8, codes of the signed and of the unsigned dynamic map, with m_scales and v_scales (Len/256); or " +
			"p, m and v are all bf16, rounded stochastically.",
		In:    []Operand{gradIn, coefIn, hyperIn},
		Out:   []Operand{StateOut("p").typ([]DType{F32, BF16}), moment("m"), moment("v"), lowOut, scales("m"), scales("v")},
		Attr:  UpdateAttr{},
		check: func(c *checker) { c.update(1, 2, -1, false) },
		flops: func(c *checker) int64 { return 16 * c.in(0).elems() },
	},
	{
		Kind:  SGD,
		Doc:   "SGD with momentum on coef·g; g, p, momentum (Len).",
		In:    []Operand{gradIn, coefIn, hyperIn},
		Out:   []Operand{StateOut("p"), StateOut("momentum"), lowOut},
		Attr:  UpdateAttr{},
		check: func(c *checker) { c.update(1, 2, -1, false) },
		flops: func(c *checker) int64 { return 6 * c.in(0).elems() },
	},
	{
		Kind: LAMBDirection,
		Doc: "LAMB's (You et al. 2020) Adam direction, which replaces g, and norms += the exact squares of p and of it for each parameter of the unit with decay (AdaptAll: for each); " +
			"p, g, m, v (Len), norms i64 (2·params·Limbs).",
		In:    []Operand{in("p", "(Len)").typ(isF32).per(1), coefIn, hyperIn},
		Out:   []Operand{StateOut("g"), StateOut("m"), StateOut("v"), norms.mode(modeA)},
		Attr:  UpdateAttr{},
		check: func(c *checker) { c.update(1, 2, -1, true) },
		flops: func(c *checker) int64 { return 18 * c.in(0).elems() },
	},
	{
		Kind:  ParamNorms,
		Doc:   "norms += the exact squares of p and g for each parameter of the unit with decay (AdaptAll: for each); p, g (Len), norms i64 (2·params·Limbs).",
		In:    []Operand{in("p", "(Len)").typ(isF32).per(1), gradIn},
		Out:   []Operand{norms.mode(modeA)},
		Attr:  UpdateAttr{},
		check: func(c *checker) { c.update(-1, -1, -1, true) },
		flops: func(c *checker) int64 { return 4 * c.in(0).elems() },
	},
	{
		Kind:  LAMBApply,
		Doc:   "p −= lr·(‖p‖/‖g‖)·g for each parameter, g the direction, the ratio 1 where a norm is 0; g, p (Len), norms i64 (2·params·Limbs).",
		In:    []Operand{gradIn, norms, coefIn, hyperIn},
		Out:   []Operand{StateOut("p"), lowOut},
		Attr:  UpdateAttr{},
		check: func(c *checker) { c.update(2, 3, 1, false) },
		flops: func(c *checker) int64 { return 2 * c.in(0).elems() },
	},
	{
		Kind:  LARSApply,
		Doc:   "LARS (You et al. 2017), or LARC's clipped form, with momentum on coef·g; g, p, momentum (Len), norms i64 (2·params·Limbs).",
		In:    []Operand{gradIn, norms, coefIn, hyperIn},
		Out:   []Operand{StateOut("p"), StateOut("momentum"), lowOut},
		Attr:  UpdateAttr{},
		check: func(c *checker) { c.update(2, 3, 1, false) },
		flops: func(c *checker) int64 { return 8 * c.in(0).elems() },
	},
	{
		Kind:  NovoGrad,
		Doc:   "NovoGrad (Ginsburg et al. 2019) on coef·g: one second moment a parameter; g, p, m (Len), v (params of the unit), norms i64 (2·params·Limbs).",
		In:    []Operand{gradIn, norms, coefIn, hyperIn},
		Out:   []Operand{StateOut("p"), StateOut("m"), {Name: "v", Shape: "(params)", Types: isF32, Modes: modeRW, Per: PerParam}, lowOut},
		Attr:  UpdateAttr{},
		check: func(c *checker) { c.update(2, 3, 1, false) },
		flops: func(c *checker) int64 { return 10 * c.in(0).elems() },
	},
}

// shard checks a unit and mesh axis, and returns the unit's distinct parameters.
func (c *checker) shard(a ShardAttr) int64 {
	c.positive("Len", a.Len)
	if c.err == nil && (a.Unit < 0 || a.Unit >= len(c.p.Units)) {
		c.failf("unit is %d, want 0 to %d", a.Unit, len(c.p.Units)-1)
	}
	if c.err == nil && (a.Axis < -1 || a.Axis >= len(c.p.Mesh)) {
		c.failf("mesh axis is %d, want −1 (whole) to %d", a.Axis, len(c.p.Mesh)-1)
	}
	if c.err == nil && (a.Start < 0 || a.Part < 0 || a.Part > 0 && (a.Len > a.Part || a.Start > a.Part-a.Len) || a.Part == 0 && a.Start > 0) {
		c.failf("elements %d to %d are outside the rank's part of %d", a.Start, a.Start+a.Len, a.Part)
	}
	if c.err != nil {
		return 0
	}
	seen := map[int]bool{}
	for _, s := range c.p.Units[a.Unit].Segments {
		seen[s.Param] = true
	}
	return int64(len(seen))
}

// update checks an optimizer's operands: everything has Len elements, but the
// scalars at inputs coef and hyper and the norms at input norms (−1: none; with
// outNorms the last output).
func (c *checker) update(coef, hyper, norms int, outNorms bool) {
	a := c.op.Attr.(UpdateAttr)
	params := c.shard(a.Shard)
	norm := func(r ref) {
		if c.err == nil && params > 0 && r.elems()%(2*params) != 0 {
			c.failf("operand %s (%s, shape %v): number of elements is %d, want a multiple of %d (two accumulators for each of the unit's %d parameters)",
				r.name, r.buf.Name, r.buf.Shape, r.elems(), 2*params, params)
		}
	}
	for i, o := range c.inOps {
		switch i {
		case coef:
			c.vector(c.in(i), 1, "a scalar")
		case hyper:
			c.vector(c.in(i), NumHyper, "the Hyper slots")
		case norms:
			norm(c.in(i))
		default:
			c.perElement(c.in(i), o, a.Shard.Len, params)
		}
	}
	for i, o := range c.outOps {
		if outNorms && i == len(c.outOps)-1 {
			norm(c.out(i))
		} else {
			c.perElement(c.out(i), o, a.Shard.Len, params)
		}
	}
	if c.op.Kind == AdamW && c.err == nil && c.out(1).buf.DType != c.out(2).buf.DType {
		c.failf("operands m and v are %v and %v, want one type", c.out(1).buf.DType, c.out(2).buf.DType)
	}
	c.stochastic(a)
}

// stochastic checks that what rests in bf16 is rounded stochastically, and nothing else.
func (c *checker) stochastic(a UpdateAttr) {
	if c.err != nil {
		return
	}
	if c.op.Kind != AdamW {
		if a.Stochastic {
			c.failf("is rounded stochastically; only adamw has that form")
		}
		return
	}
	for _, r := range []ref{c.out(0), c.out(1)} {
		if low := r.buf.DType == BF16; low != a.Stochastic {
			c.failf("operand %s (%s) is %v with stochastic rounding %v; what rests in bf16 is rounded so, p and both moments", r.name, r.buf.Name, r.buf.DType, a.Stochastic)
		}
	}
	if a.Stochastic && c.out(3).ok() {
		c.failf("operand low (%s) is a copy of p, which has 16 bits already", c.out(3).buf.Name)
	}
}

// perElement checks an operand that goes by the elements of a shard of n, or by
// the unit's parameters.
func (c *checker) perElement(r ref, o Operand, n, params int64) {
	switch {
	case !r.ok():
	case o.Per == PerParam:
		c.vector(r, params, "one for each of the unit's parameters")
	case o.Per > 1 && n%o.Per != 0:
		c.failf("operand %s has one element for each %d of the shard's %d, which is no multiple of that", r.name, o.Per, n)
	case o.Per > 0:
		what := "the shard's Len"
		if o.Per > 1 {
			what += "/" + strconv.FormatInt(o.Per, 10)
		}
		c.vector(r, n/o.Per, what)
	}
}
