package cpu

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device"
	devcpu "github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/kernels/cpu/exact"
	"github.com/spillway-ml/spillway/kernels/cpu/interp"
	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// operation is a program of one operation on random data, run bound and
// interpreted.
type operation struct {
	p      *graph.Program
	rank   int
	f32    map[graph.BufID][]float32 // contents before
	f64    map[graph.BufID][]float64
	i64    map[graph.BufID][]int64
	i32    map[graph.BufID][]int32
	u16    map[graph.BufID][]uint16 // bf16 and f16, as bits
	rng    *rand.Rand
	places map[graph.BufID]device.Ptr
}

func (o *operation) op() *graph.Op { return &o.p.Sections[0].Phases[0].Ops[0] }

// newOperation draws an operation of the kind: which optional operands there
// are, output modes, and contents.
func newOperation(kind graph.Kind, rng *rand.Rand) *operation {
	s := shapes[kind](rng)
	info, _ := graph.InfoOf(kind)
	ins, outs := info.Operands(s.attr)
	o := &operation{
		p: &graph.Program{}, rng: rng,
		f32: map[graph.BufID][]float32{}, f64: map[graph.BufID][]float64{}, i64: map[graph.BufID][]int64{}, i32: map[graph.BufID][]int32{}, u16: map[graph.BufID][]uint16{},
	}
	if s.unit != nil {
		o.p.Mesh = []graph.Axis{{Name: "data", Size: s.world}}
		o.p.Params, o.p.Units = s.params, []graph.Unit{*s.unit}
		o.rank = rng.IntN(s.world)
	}
	op := graph.Op{Kind: kind, Name: "op", Attr: s.attr, Work: graph.NoBuf, Skip: graph.NoBuf, Unit: -1}
	if s.types != nil { // the kind table has several, the kernels these
		ins, outs = slices.Clone(ins), slices.Clone(outs)
		ins[0].Types, outs[0].Types = s.types[:1], s.types[1:]
		if s.types[1] != graph.F32 {
			outs[0].Modes = outs[0].Modes[:1]
		}
	}
	for i, d := range ins {
		if d.Optional && rng.IntN(3) == 0 {
			op.In = append(op.In, graph.NoBuf)
			continue
		}
		op.In = append(op.In, o.buffer(d, s.in[i], s))
	}
	absent := -1
	if n := slices.IndexFunc(outs, func(d graph.Operand) bool { return d.Optional }); n >= 0 && rng.IntN(2) == 0 {
		absent = n + rng.IntN(len(outs)-n)
	}
	if kind == graph.Linear && s.attr.(graph.LinearAttr).Act == graph.ActNone {
		absent = 1 // pre belongs to an activation
	}
	for i, d := range outs {
		if i == absent {
			op.Out = append(op.Out, graph.Out{Buf: graph.NoBuf})
			continue
		}
		over := slices.IndexFunc(ins, func(in graph.Operand) bool { return d.Over != "" && in.Name == d.Over })
		if over >= 0 && rng.IntN(2) == 0 {
			op.Out = append(op.Out, graph.Out{Buf: op.In[over], Mode: graph.ReadWrite})
			continue
		}
		if len(d.Types) == 0 {
			d.Types = []graph.DType{[]graph.DType{graph.F32, graph.F64, graph.I64, graph.I32}[rng.IntN(4)]}
		}
		op.Out = append(op.Out, graph.Out{Buf: o.buffer(d, s.out[i], s), Mode: d.Modes[rng.IntN(len(d.Modes))]})
	}
	if rng.IntN(4) == 0 {
		op.Skip = o.p.AddBuffer(graph.Buffer{Name: "skip", DType: graph.I32, Shape: []int64{1}})
		o.i32[op.Skip] = []int32{int32(rng.IntN(2))}
	}
	o.p.Sections = []graph.Section{{Name: "s", Phases: []graph.Phase{{Name: "p", Repeat: 1, Ops: []graph.Op{op}}}}}
	o.p = graph.AddWorkspace(o.p, graph.CPUTarget())
	return o
}

// buffer adds an operand with contents that its name calls for.
func (o *operation) buffer(d graph.Operand, shape []int64, s spec) graph.BufID {
	id := o.p.AddBuffer(graph.Buffer{Name: d.Name, DType: d.Types[0], Shape: shape, Unit: -1})
	n, rng := o.p.Buf(id).Elems(), o.rng
	switch d.Types[0] {
	case graph.BF16, graph.F16:
		v := make([]uint16, n)
		for i := range v {
			v[i] = uint16(rng.Uint32())
		}
		o.u16[id] = v
	case graph.F32:
		v := make([]float32, n)
		for i := range v {
			v[i] = float32(rng.NormFloat64())
			switch d.Name {
			case "v", "rstd", "coef":
				v[i] = float32(math.Abs(float64(v[i])))
			}
		}
		if s.unit == nil && d.Name != "coef" && rng.IntN(8) == 0 {
			v[rng.IntN(len(v))] = float32(math.Inf(1 - 2*rng.IntN(2)))
		}
		o.f32[id] = v
	case graph.F64:
		v := make([]float64, n)
		for i := range v {
			v[i] = rng.Float64() + 0.1
		}
		o.f64[id] = v
	case graph.I64:
		v := make([]int64, n)
		switch {
		case d.Name == "key":
			v = []int64{rng.Int64(), rng.Int64N(1000), rng.Int64N(1000), rng.Int64N(int64(max(s.classes, 1))), 1, 0, 0, 0}
		default: // exact accumulators
			for i := 0; i+exact.Limbs <= len(v); i += exact.Limbs {
				exact.Accumulator(v[i : i+exact.Limbs]).Add(rng.Float64() * 100)
				if s.overflows && rng.IntN(2) == 0 {
					exact.Accumulator(v[i : i+exact.Limbs]).Add([]float64{math.Inf(1), math.NaN()}[rng.IntN(2)])
				}
			}
		}
		o.i64[id] = v
	default:
		v := make([]int32, n)
		for i := range v {
			v[i] = int32(rng.IntN(max(s.classes, 1)))
			if d.Name == "targets" && rng.IntN(5) == 0 {
				v[i] = -1
			}
		}
		o.i32[id] = v
	}
	return id
}

// interpret returns every buffer's bytes after the interpreter.
func (o *operation) interpret(t *testing.T) map[graph.BufID][]byte {
	w := interp.New[float32](o.p)
	for id, v := range o.f32 {
		require.NoError(t, w.Set(id, v))
	}
	for id, v := range o.f64 {
		dst, err := w.F64(o.rank, id)
		require.NoError(t, err)
		copy(dst, v)
	}
	for id, v := range o.i64 {
		for r := range w.Ranks() {
			dst, err := w.I64(r, id)
			require.NoError(t, err)
			copy(dst, v)
		}
	}
	for id, v := range o.i32 {
		dst, err := w.I32(o.rank, id)
		require.NoError(t, err)
		copy(dst, v)
	}
	for id, v := range o.u16 {
		dst, err := w.U16(o.rank, id)
		require.NoError(t, err)
		copy(dst, v)
	}
	require.NoError(t, w.RunRank("s", o.rank))
	out := map[graph.BufID][]byte{}
	for id := range o.f32 {
		v, _ := w.Floats(o.rank, id)
		out[id] = asBytes(v)
	}
	for id := range o.f64 {
		v, _ := w.F64(o.rank, id)
		out[id] = asBytes(v)
	}
	for id := range o.i64 {
		v, _ := w.I64(o.rank, id)
		out[id] = asBytes(v)
	}
	for id := range o.i32 {
		v, _ := w.I32(o.rank, id)
		out[id] = asBytes(v)
	}
	for id := range o.u16 {
		v, _ := w.U16(o.rank, id)
		out[id] = asBytes(v)
	}
	return out
}

// bind places the operation's buffers in a poisoned arena, with gaps between
// them and starts that are multiples of the element's size only, and binds it.
func (o *operation) bind(t testing.TB, ctx *devcpu.Context, pl *pool.Pool) device.Kernel {
	o.places = map[graph.BufID]device.Ptr{}
	off := int64(0)
	for id := range o.p.Buffers {
		b := &o.p.Buffers[id]
		off = aligned(off + 64)
		if b.DType != graph.U8 {
			off += o.rng.Int64N(16) * b.DType.Size()
		}
		o.places[graph.BufID(id)] = device.Ptr{Off: off, Len: b.Bytes()}
		off += b.Bytes()
	}
	arena, err := ctx.Alloc(graph.Device, off+64)
	require.NoError(t, err)
	for id, p := range o.places {
		p.Arena = arena
		o.places[id] = p
	}
	o.load(t)
	op := o.op()
	b := kernels.Binding{Program: o.p, Op: op}
	if o.p.Mesh != nil {
		b.Coord = []int{o.rank}
	}
	for _, id := range op.In {
		b.In = append(b.In, o.places[id]) // NoBuf: the zero Ptr
	}
	for _, q := range op.Out {
		b.Out = append(b.Out, o.places[q.Buf])
	}
	b.Work, b.Skip = o.places[op.Work], o.places[op.Skip]
	k, err := New(pl).Bind(b)
	require.NoError(t, err)
	return k
}

// load puts the contents before the operation in place.
func (o *operation) load(t testing.TB) {
	put := func(id graph.BufID, v []byte) {
		b, err := devcpu.Bytes(o.places[id])
		require.NoError(t, err)
		copy(b, v)
	}
	for id, v := range o.f32 {
		put(id, asBytes(v))
	}
	for id, v := range o.f64 {
		put(id, asBytes(v))
	}
	for id, v := range o.i64 {
		put(id, asBytes(v))
	}
	for id, v := range o.i32 {
		put(id, asBytes(v))
	}
	for id, v := range o.u16 {
		put(id, asBytes(v))
	}
}

// launch runs k on a stream of the device, which checks what it writes.
func launch(t testing.TB, ctx *devcpu.Context, k device.Kernel) error {
	s, err := ctx.NewStream(graph.Compute)
	require.NoError(t, err)
	if err := s.Launch(k); err != nil {
		return err
	}
	return s.Sync()
}

// unbound are the kinds that the executor binds itself.
var unbound = []graph.Kind{graph.AllGather, graph.ReduceScatter, graph.AllReduce, graph.Copy, graph.Join}

// TestEveryKindEqualsInterpreter runs random operations of every kind on the
// device and compares every byte of every operand with the interpreter's.
func TestEveryKindEqualsInterpreter(t *testing.T) {
	for _, kind := range graph.Kinds() {
		if slices.Contains(unbound, kind) {
			continue
		}
		require.Contains(t, binders, kind)
		require.Contains(t, shapes, kind, "the test has no operations of this kind")
		t.Run(string(kind), func(t *testing.T) {
			for seed := range uint64(24) {
				rng := rand.New(rand.NewPCG(seed, 1))
				o := newOperation(kind, rng)
				require.NoError(t, graph.Check(o.p, o.op()), "seed %d", seed)
				want := o.interpret(t)
				for _, threads := range []int{1, 3} {
					compare(t, o, want, threads, seed)
				}
			}
		})
	}
}

func compare(t *testing.T, o *operation, want map[graph.BufID][]byte, threads int, seed uint64) {
	ctx := devcpu.New(0, devcpu.Options{Poison: true, Checker: devcpu.NewChecker()})
	defer func() { require.NoError(t, ctx.Close()) }()
	pl := pool.New(threads)
	defer pl.Close()
	k := o.bind(t, ctx, pl)
	require.NoError(t, launch(t, ctx, k), "seed %d", seed)
	for id, w := range want {
		got, err := devcpu.Bytes(o.places[id])
		require.NoError(t, err)
		if !sameBits(o.p.Buf(id).DType, got, w) {
			require.Failf(t, "bits differ", "seed %d, %d threads, %s of %+v attr %+v:\n got %v\nwant %v", seed, threads,
				o.p.Buf(id).Name, o.op(), o.op().Attr, head(o.p.Buf(id).DType, got), head(o.p.Buf(id).DType, w))
		}
	}
}

// sameBits compares element by element; any NaN equals any NaN, whose payload
// and sign are not defined.
func sameBits(dt graph.DType, a, b []byte) bool {
	if slices.Equal(a, b) {
		return true
	}
	switch dt {
	case graph.F32:
		return slices.EqualFunc(values[float32](a), values[float32](b), func(x, y float32) bool {
			return math.Float32bits(x) == math.Float32bits(y) || x != x && y != y
		})
	case graph.I64: // exact accumulators: their digits carry as they were added
		return slices.Equal(normalized(a), normalized(b))
	case graph.F64:
		return slices.EqualFunc(values[float64](a), values[float64](b), func(x, y float64) bool {
			return math.Float64bits(x) == math.Float64bits(y) || x != x && y != y
		})
	}
	return false
}

func normalized(b []byte) []int64 {
	v := slices.Clone(values[int64](b))
	for i := 0; i+exact.Limbs <= len(v); i += exact.Limbs {
		exact.Accumulator(v[i : i+exact.Limbs]).Normalize()
	}
	return v
}

func head(dt graph.DType, b []byte) string {
	if dt == graph.F32 {
		v := values[float32](b)
		return fmt.Sprint(v[:min(len(v), 24)])
	}
	return fmt.Sprint(b[:min(len(b), 64)])
}

// TestNoAllocation: a bound kernel allocates nothing when it runs.
func TestNoAllocation(t *testing.T) {
	pl := pool.New(2)
	defer pl.Close()
	for kind := range shapes {
		ctx := devcpu.New(0, devcpu.Options{})
		o := newOperation(kind, rand.New(rand.NewPCG(7, 7)))
		k := o.bind(t, ctx, pl).(devcpu.Kernel)
		n := testing.AllocsPerRun(10, func() {
			if k.Run() != nil {
				panic("failed")
			}
		})
		require.Zero(t, n, "%s allocates", kind)
		require.NoError(t, ctx.Close())
	}
}

// TestLevelsAgree runs the same operations at every SIMD level of this CPU, in
// processes of their own, since a process chooses its level once.
func TestLevelsAgree(t *testing.T) {
	const child = "SPILLWAY_TEST_DIGEST"
	if os.Getenv(child) != "" {
		require.NoError(t, level.Err())
		fmt.Printf("digest %v %s\n", level.Current(), digest(t))
		return
	}
	if testing.Short() {
		t.Skip("starts processes")
	}
	got := map[string]string{}
	for l := level.Portable; l <= level.Best(); l++ {
		cmd := exec.Command(os.Args[0], "-test.run=^TestLevelsAgree$")
		cmd.Env = append(os.Environ(), level.Env+"="+l.String(), child+"=1")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		for line := range strings.Lines(string(out)) {
			if f := strings.Fields(line); len(f) == 3 && f[0] == "digest" {
				require.Equal(t, l.String(), f[1])
				got[f[1]] = f[2]
			}
		}
		require.Contains(t, got, l.String(), "%s", out)
		require.Equal(t, got[level.Portable.String()], got[l.String()], "%v differs from the portable kernels", l)
	}
}

// digest is a hash of the results of operations of every kind.
func digest(t *testing.T) string {
	h := sha256.New()
	pl := pool.New(2)
	defer pl.Close()
	for _, kind := range graph.Kinds() {
		if shapes[kind] == nil {
			continue
		}
		for seed := range uint64(6) {
			o := newOperation(kind, rand.New(rand.NewPCG(seed, 2)))
			ctx := devcpu.New(0, devcpu.Options{})
			k := o.bind(t, ctx, pl)
			require.NoError(t, launch(t, ctx, k))
			for id := range o.p.Buffers {
				b, err := devcpu.Bytes(o.places[graph.BufID(id)])
				require.NoError(t, err)
				switch o.p.Buffers[id].DType {
				case graph.U8: // workspace: contents are nobody's promise
				case graph.F32:
					for _, v := range values[float32](b) {
						if v != v {
							v = 0 // payloads of NaN are not defined
						}
						fmt.Fprintf(h, "%x ", math.Float32bits(v))
					}
				default:
					h.Write(b)
				}
			}
			require.NoError(t, ctx.Close())
		}
	}
	for _, name := range slices.Sorted(maps.Keys(tinyModels)) {
		p := tinyProgram(t, name)
		b := bindProgram(t, p, pl)
		b.load(t, contents(p, 6))
		b.run(t)
		for i := range p.Params {
			g, err := devcpu.Bytes(b.ptr(p.Params[i].Grad))
			require.NoError(t, err)
			h.Write(g)
		}
		require.NoError(t, b.ctx.Close())
	}
	return hex.EncodeToString(h.Sum(nil))
}

// TestWorkspaceOfTarget proves that graph.CPUTarget's numbers are the kernels'.
func TestWorkspaceOfTarget(t *testing.T) {
	target := graph.CPUTarget()
	require.EqualValues(t, exact.Limbs, target.Limbs)
	require.EqualValues(t, workAlign, target.Align)
	require.EqualValues(t, headRows, target.HeadRows)
	require.Zero(t, target.HeadRows%target.Product.KC)
	rng := rand.New(rand.NewPCG(3, 3))
	needed := map[graph.Kind]bool{}
	for range 40 {
		for kind, draw := range bigShapes {
			s := draw(rng)
			info, _ := graph.InfoOf(kind)
			ins, outs := info.Operands(s.attr)
			p := &graph.Program{}
			op := graph.Op{Kind: kind, Name: "op", Attr: s.attr, Work: graph.NoBuf, Skip: graph.NoBuf, Unit: -1}
			for i, d := range ins {
				op.In = append(op.In, p.AddBuffer(graph.Buffer{Name: d.Name, DType: d.Types[0], Shape: s.in[i]}))
			}
			for i, d := range outs {
				o := graph.Out{Buf: graph.NoBuf}
				if !d.Optional || rng.IntN(2) == 0 && kind != graph.Linear {
					o = graph.Out{Buf: p.AddBuffer(graph.Buffer{Name: d.Name, DType: d.Types[0], Shape: s.out[i]}), Mode: d.Modes[0]}
				}
				op.Out = append(op.Out, o)
			}
			require.NoError(t, graph.Check(p, &op))
			want := workspace(p, &op)
			require.Equal(t, want, target.Workspace(p, &op), "%s %+v in %v out %v", kind, s.attr, s.in, s.out)
			require.Zero(t, want%target.Align)
			needed[kind] = needed[kind] || want > 0
		}
	}
	for kind := range shapes {
		if _, ok := bigShapes[kind]; !ok {
			o := newOperation(kind, rng)
			require.Zero(t, workspace(o.p, o.op()), "%s", kind)
			require.Zero(t, target.Workspace(o.p, o.op()), "%s", kind)
		}
	}
	for kind, n := range needed {
		require.True(t, n, "%s never needed workspace", kind)
	}
}
