package graph

import (
	"slices"
	"strconv"
)

// Operands of the updates.
var (
	hyperIn = in("hyper", "(NumHyper)").typ(isF64)
	gradIn  = in("g", "(Len)").typ(isFloat).per(1) // in the compute type; p and the states are f32
	norms   = Operand{Name: "norms", Shape: "(2·params·Limbs)", Types: isI64}
)

// UpdateIn returns the inputs of a rule's operation: the gradient, the factor to
// multiply it by, and the step's numbers (Hyper* constants).
func UpdateIn() []Operand {
	return []Operand{gradIn, in("coef", "(1)").typ(isF32), hyperIn}
}

// NormedIn returns UpdateIn with the norms of the unit's parameters inserted after the gradient.
func NormedIn() []Operand { return slices.Insert(UpdateIn(), 1, norms) }

// ValueIn returns the operand of the parameters as an input.
func ValueIn() Operand { return in("p", "(Len)").typ(isF32).per(1) }

// NormsOut returns the output that adds squares to the norms of the unit's parameters.
func NormsOut() Operand { return norms.mode(modeA) }

// StateOut returns the operand of a state, or of the parameters: one element for each element of
// the shard, changed in place.
func StateOut(name string) Operand {
	return Operand{Name: name, Shape: "(Len)", Types: isF32, Modes: modeRW, Per: 1}
}

// NarrowOut returns the operand of a state that may be stored in bf16 and, with eightBits, in 8
// bits with ScalesOut. Parameters pass false.
func NarrowOut(name string, eightBits bool) Operand {
	if eightBits {
		return StateOut(name).typ([]DType{F32, U8, BF16})
	}
	return StateOut(name).typ([]DType{F32, BF16})
}

// ScalesOut returns the operand of the scales of a state in 8 bits.
func ScalesOut(of string) Operand {
	return Operand{Name: of + "_scales", Shape: "(Len/256)", Types: isF32, Modes: modeRW, Per: QuantBlock, ScaleOf: of, Optional: true}
}

// ParamOut returns the operand of a state with one element for each of the unit's parameters.
func ParamOut(name string) Operand {
	return Operand{Name: name, Shape: "(params)", Types: isF32, Modes: modeRW, Per: PerParam}
}

// LowOut returns the optional operand of the 16-bit parameter copy that the model computes with.
// The update writes it rounded.
func LowOut() Operand { return out("low", "(Len)").typ(isHalf).opt().per(1) }

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
		Kind:  ParamNorms,
		Doc:   "norms += the exact squares of p and g for each parameter of the unit with decay (AdaptAll: for each); p, g (Len), norms i64 (2·params·Limbs).",
		In:    []Operand{ValueIn(), gradIn},
		Out:   []Operand{NormsOut()},
		Attr:  UpdateAttr{},
		check: (*checker).update,
		flops: func(c *checker) int64 { return 4 * c.in(0).elems() },
	},
	{
		Kind: NewtonSchulz,
		Doc: "y = Factor·X, where X begins as x·(1/(‖x‖ + 1e-7)) and NewtonSchulzSteps times becomes (a·I + b·G + c·G²)·X with G = X·Xᵀ " +
			"(of more rows than columns X·(a·I + b·G + c·G²) with G = Xᵀ·X): singular values come near 1. x, y (R,C). y is 0 where the rank is not Owner.",
		In:   []Operand{in("x", "(R,C)").typ(isF32)},
		Out:  []Operand{{Name: "y", Shape: "(R,C)", Types: isF32, Modes: modeW}},
		Attr: NewtonSchulzAttr{},
		check: func(c *checker) {
			a := c.op.Attr.(NewtonSchulzAttr)
			c.rank2(c.in(0))
			c.same(c.out(0), c.in(0))
			if c.err == nil && (a.Axis < -1 || a.Axis >= len(c.p.Mesh)) {
				c.failf("mesh axis is %d, want −1 (every rank) to %d", a.Axis, len(c.p.Mesh)-1)
			}
			if c.err == nil && (a.Ranks < 1 || a.Owner < 0 || a.Owner >= a.Ranks) {
				c.failf("owner is %d of %d ranks, want one of them", a.Owner, a.Ranks)
			}
			if c.err == nil && !(a.Factor > 0) {
				c.failf("Factor is %g, want more than 0", a.Factor)
			}
		},
		flops: func(c *checker) int64 {
			return NewtonSchulzFlops(c.in(0).rows(), c.in(0).cols()) / int64(c.op.Attr.(NewtonSchulzAttr).Ranks)
		},
		work:     Target.newtonSchulzWork,
		cudaWork: Target.newtonSchulzCUDAWork,
	},
}

// NewtonSchulzSteps and NewtonSchulzCoefficients (a, b and c) are from Jordan et al., Muon: An
// optimizer for hidden layers in neural networks, 2024. The steps map singular values between 0.003
// and 1 to values between 0.68 and 1.14.
const NewtonSchulzSteps = 5

// MuonMomentum is the momentum of the same paper.
const MuonMomentum = 0.95

// NewtonSchulzCoefficients are described at NewtonSchulzSteps.
var NewtonSchulzCoefficients = [3]float64{3.4445, -4.7750, 2.0315}

// NewtonSchulzFlops returns the operations of the products for a matrix (R,C); the two symmetric
// products count half. With one matrix a rank, the mean over the ranks is this divided by their
// number.
func NewtonSchulzFlops(rows, cols int64) int64 {
	k, n := min(rows, cols), max(rows, cols)
	return NewtonSchulzSteps * (k*(k+1)*n + k*(k+1)*k + 2*k*k*n)
}

// newtonSchulzWork returns the bytes for G, G², another X, a row of zeros, and the packed factors
// of the largest product.
func (t Target) newtonSchulzWork(p *Program, op *Op) int64 {
	r, c := p.Buf(op.In[0]).matrix()
	k := min(r, c)
	product := max(t.product(k, k, max(r, c), r <= c, false, false), t.product(k, k, k, false, false, false), t.product(r, c, k, false, false, false))
	return t.newtonSchulzCUDAWork(p, op) + t.align(4*c) + product
}

func (t Target) newtonSchulzCUDAWork(p *Program, op *Op) int64 {
	r, c := p.Buf(op.In[0]).matrix()
	k := min(r, c)
	return 2*t.align(4*k*k) + t.align(4*r*c)
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

// update checks the operands of an update rule's operation, each by its name or by its number of
// elements.
func (c *checker) update() {
	a := c.op.Attr.(UpdateAttr)
	params := c.shard(a.Shard)
	one := func(r ref, o Operand) {
		switch o.Name {
		case "coef":
			c.vector(r, 1, "a scalar")
		case "hyper":
			c.vector(r, NumHyper, "the Hyper slots")
		case norms.Name:
			if c.err == nil && params > 0 && r.elems()%(2*params) != 0 {
				c.failf("operand %s (%s, shape %v): number of elements is %d, want a multiple of %d (two accumulators for each of the unit's %d parameters)",
					r.name, r.buf.Name, r.buf.Shape, r.elems(), 2*params, params)
			}
		default:
			c.perElement(r, o, a.Shard.Len, params)
		}
	}
	for i, o := range c.inOps {
		one(c.in(i), o)
	}
	for i, o := range c.outOps {
		one(c.out(i), o)
	}
	c.narrow(a.Stochastic)
}

// narrow checks the outputs that can be stored in fewer bits. All are in bf16 if the rule rounds
// stochastically, none otherwise. Those that allow 8 bits all have the same type.
func (c *checker) narrow(stochastic bool) {
	bits, form := ref{}, false
	for k, o := range c.outOps {
		r := c.out(k)
		if c.err != nil || !r.ok() || !slices.Contains(o.Types, F32) || !slices.Contains(o.Types, BF16) {
			continue
		}
		form = true
		if (r.buf.DType == BF16) != stochastic {
			c.failf("operand %s (%s) is %v with stochastic rounding %v; parameters and states rest in bf16 with it, and only with it", r.name, r.buf.Name, r.buf.DType, stochastic)
		}
		if slices.Contains(o.Types, U8) {
			if bits.ok() && bits.buf.DType != r.buf.DType {
				c.failf("operands %s and %s are %v and %v, want one type", bits.name, r.name, bits.buf.DType, r.buf.DType)
			}
			bits = r
		}
	}
	if c.err != nil || !stochastic {
		return
	}
	if !form {
		c.failf("is rounded stochastically, and has no form in bf16")
	}
	for k, o := range c.outOps {
		if o.Name == LowOut().Name && c.out(k).ok() {
			c.failf("operand low (%s) is a copy of p, which has 16 bits already", c.out(k).buf.Name)
		}
	}
}

// perElement checks an operand whose size depends on the n elements of a shard or on the unit's
// parameters.
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
