package cpu

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device"
	devcpu "github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/interp"
	"github.com/spillway-ml/spillway/internal/testkit/optest"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/kernels/cpu/exact"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/zero"
)

// bound is a program whose operations are bound, with a separate place for every root buffer.
type bound struct {
	p       *graph.Program
	ctx     *devcpu.Context
	arena   device.Arena
	offset  []int64
	kernels []device.Kernel
}

func (b *bound) ptr(id graph.BufID) device.Ptr {
	if id == graph.NoBuf {
		return device.Ptr{}
	}
	root, off := b.p.Resolve(id, nil)
	return device.Ptr{Arena: b.arena, Off: b.offset[root] + off, Len: b.p.Buf(id).Bytes()}
}

func bindProgram(t testing.TB, p *graph.Program, pl *pool.Pool, coord ...int) *bound {
	b := &bound{p: p, ctx: devcpu.New(0, devcpu.Options{Poison: true, Checker: devcpu.NewChecker()})}
	size := int64(0)
	for i := range p.Buffers {
		b.offset = append(b.offset, size)
		if p.Buffers[i].View == nil {
			size = aligned(size + p.Buffers[i].Bytes() + 1) // at least one byte of poison between buffers
		}
	}
	var err error
	b.arena, err = b.ctx.Alloc(graph.Device, size)
	require.NoError(t, err)
	lib := New(pl)
	ops := p.Sections[0].Phases[0].Ops
	for i := range ops {
		kb := kernels.Binding{Program: p, Op: &ops[i], Coord: coord, Work: b.ptr(ops[i].Work), Skip: b.ptr(ops[i].Skip)}
		for _, id := range ops[i].In {
			kb.In = append(kb.In, b.ptr(id))
		}
		for _, o := range ops[i].Out {
			kb.Out = append(kb.Out, b.ptr(o.Buf))
		}
		k, err := lib.Bind(kb)
		require.NoError(t, err)
		b.kernels = append(b.kernels, k)
	}
	return b
}

func (b *bound) run(t testing.TB) {
	s, err := b.ctx.NewStream(graph.Compute)
	require.NoError(t, err)
	for _, k := range b.kernels {
		require.NoError(t, s.Launch(k))
	}
	require.NoError(t, s.Sync())
}

var tinyModels = map[string]struct {
	config     model.Config
	batch, seq int
}{
	"gpt2": {model.Config{
		Family: model.GPT2, Layers: 2, Width: 36, Heads: 3, Vocab: 101, Positions: 80, TiedHead: true, ResidDropout: 0.1,
	}, 4, 77},
	"llama": {model.Config{
		Family: model.Llama, Layers: 2, Width: 40, Heads: 4, KVHeads: 2, HeadDim: 10, FFN: 70, Vocab: 99, Positions: 90,
	}, 2, 90},
	"gemma2": {model.Config{
		Family: model.Gemma2, Layers: 2, Width: 40, Heads: 4, KVHeads: 2, HeadDim: 10, FFN: 70, Vocab: 99, Positions: 90, TiedHead: true,
		Gemma2Config: model.Gemma2Config{AttnCap: 2, LogitCap: 3, Window: 20, QueryScalar: 10},
	}, 2, 90},
	"cnn": {model.Config{Family: model.CNN, Height: 14, ImgWidth: 13, Chans: 3, Hidden: []int{5, 9}, Classes: 10}, 4, 1},
	"mlp": {model.Config{Family: model.MLP, Inputs: 50, Hidden: []int{37, 20}, Classes: 10}, 20, 1},
}

// inputs holds the values of a program's inputs, by buffer.
type inputs struct {
	f32 map[graph.BufID][]float32
	i32 map[graph.BufID][]int32
	f64 map[graph.BufID][]float64
	i64 map[graph.BufID][]int64
}

func (b *bound) load(t testing.TB, c inputs) {
	for id, v := range c.f32 {
		place(t, b.ptr(id), optest.Bytes(v))
	}
	for id, v := range c.i32 {
		place(t, b.ptr(id), optest.Bytes(v))
	}
	for id, v := range c.f64 {
		place(t, b.ptr(id), optest.Bytes(v))
	}
	for id, v := range c.i64 {
		place(t, b.ptr(id), optest.Bytes(v))
	}
}

// contents draws a program's inputs and parameters.
func contents(p *graph.Program, seed uint64) inputs {
	rng := rand.New(rand.NewPCG(seed, 40))
	c := inputs{
		map[graph.BufID][]float32{}, map[graph.BufID][]int32{}, map[graph.BufID][]float64{p.Loss: make([]float64, p.Buf(p.Loss).Elems())}, map[graph.BufID][]int64{},
	}
	floats := func(id graph.BufID, std, mean float64) {
		v := make([]float32, p.Buf(id).Elems())
		for i := range v {
			v[i] = float32(mean + std*rng.NormFloat64())
		}
		c.f32[id] = v
	}
	for i := range p.Params {
		mean := 0.0
		if p.Params[i].Init == graph.InitOnes {
			mean = 1
		}
		floats(p.Params[i].Value, 0.2, mean)
	}
	if x := p.Find("x"); x != graph.NoBuf {
		floats(x, 1, 0)
	}
	for _, id := range []graph.BufID{p.Tokens, p.Targets} {
		if id == graph.NoBuf {
			continue
		}
		v := make([]int32, p.Buf(id).Elems())
		for i := range v {
			v[i] = rng.Int32N(10)
		}
		c.i32[id] = v
	}
	hyper := make([]float64, graph.NumHyper)
	hyper[graph.HyperInvCount], hyper[graph.HyperLossScale] = 1.0/300, 1
	c.f64[p.Hyper] = hyper
	if p.Key != graph.NoBuf {
		c.i64[p.Key] = []int64{int64(seed), 3, 12, 0, 0, 0, 0, 0}
	}
	return c
}

// TestModelsEqualInterpreter runs forward and backward of complete fused models on the device.
// Every buffer that the program keeps or computes must equal the interpreter's.
func TestModelsEqualInterpreter(t *testing.T) {
	for name := range tinyModels {
		for _, threads := range []int{1, 2} {
			t.Run(fmt.Sprintf("%s/%d threads", name, threads), func(t *testing.T) {
				p := tinyProgram(t, name)
				pl := pool.New(threads)
				defer pl.Close()
				b := bindProgram(t, p, pl)
				c := contents(p, 5)
				b.load(t, c)
				w := interp.New[float32](p)
				for id, v := range c.f32 {
					require.NoError(t, w.Set(id, v))
				}
				for id, v := range c.i32 {
					dst, err := w.I32(0, id)
					require.NoError(t, err)
					copy(dst, v)
				}
				for id, v := range c.f64 {
					dst, err := w.F64(0, id)
					require.NoError(t, err)
					copy(dst, v)
				}
				for id, v := range c.i64 {
					dst, err := w.I64(0, id)
					require.NoError(t, err)
					copy(dst, v)
				}
				require.NoError(t, w.Run("forward"))
				b.run(t)
				for id := range p.Buffers {
					if p.Buffers[id].DType != graph.F32 {
						continue
					}
					want, err := w.Floats(0, graph.BufID(id))
					require.NoError(t, err)
					got, err := devcpu.Slice[float32](b.ptr(graph.BufID(id)))
					require.NoError(t, err)
					if !optest.SameBits(graph.F32, optest.Bytes(got), optest.Bytes(want)) {
						require.Failf(t, "bits differ", "%s", p.Buffers[id].Name)
					}
				}
				want, err := w.F64(0, p.Loss)
				require.NoError(t, err)
				got, err := devcpu.Slice[float64](b.ptr(p.Loss))
				require.NoError(t, err)
				require.Equal(t, want, got)
				require.False(t, math.IsNaN(got[0]))
				require.NoError(t, b.ctx.Close())
			})
		}
	}
}

func tinyProgram(t testing.TB, name string) *graph.Program {
	m := tinyModels[name]
	p, err := model.Build(m.config, model.Train, m.batch, m.seq)
	require.NoError(t, err)
	p, err = graph.Differentiate(p)
	require.NoError(t, err)
	return graph.AddWorkspace(graph.Fuse(p), graph.CPUTarget())
}

func place(t testing.TB, p device.Ptr, v []byte) {
	b, err := devcpu.Bytes(p)
	require.NoError(t, err)
	require.Len(t, v, len(b))
	copy(b, v)
}

// TestBindRefuses: Bind refuses a wrong binding before anything runs. The error names the operation
// and the fault.
func TestBindRefuses(t *testing.T) {
	pl := pool.New(1)
	defer pl.Close()
	ctx := devcpu.New(0, devcpu.Options{})
	defer func() { require.NoError(t, ctx.Close()) }()
	arena, err := ctx.Alloc(graph.Device, 1<<20)
	require.NoError(t, err)
	host, err := ctx.Alloc(graph.Host, 4096)
	require.NoError(t, err)

	// y = x·w at places 0, 64Ki, 128Ki with workspace at 256Ki.
	good := func() kernels.Binding {
		p := &graph.Program{}
		x := p.AddBuffer(graph.Buffer{Name: "x", Shape: []int64{4, 8}})
		w := p.AddBuffer(graph.Buffer{Name: "w", Shape: []int64{8, 3}})
		y := p.AddBuffer(graph.Buffer{Name: "y", Shape: []int64{4, 3}})
		p.Sections = []graph.Section{{Name: "s", Phases: []graph.Phase{{Ops: []graph.Op{{
			Kind: graph.Linear, Name: "fc", In: []graph.BufID{x, w}, Out: []graph.Out{{Buf: y}}, Attr: graph.LinearAttr{},
			Work: graph.NoBuf, Skip: graph.NoBuf,
		}}}}}}
		p = graph.AddWorkspace(p, graph.CPUTarget())
		op := &p.Sections[0].Phases[0].Ops[0]
		at := func(id graph.BufID, off int64) device.Ptr {
			return device.Ptr{Arena: arena, Off: off, Len: p.Buf(id).Bytes()}
		}
		return kernels.Binding{
			Program: p, Op: op, In: []device.Ptr{at(x, 0), at(w, 1<<16)}, Out: []device.Ptr{at(y, 1<<17)}, Work: at(op.Work, 1<<18),
		}
	}
	_, err = New(pl).Bind(good())
	require.NoError(t, err)

	for _, c := range []struct {
		name string
		want []string
		f    func(b *kernels.Binding)
	}{
		{"unknown kind", []string{"fc", "all_reduce"}, func(b *kernels.Binding) { b.Op.Kind = graph.AllReduce }},
		{"shape", []string{"fc", "w", "dimension"}, func(b *kernels.Binding) { b.Program.Buf(1).Shape[0] = 7 }},
		{"dtype", []string{"fc", "x", "i32"}, func(b *kernels.Binding) { b.Program.Buf(0).DType = graph.I32 }},
		{"attribute", []string{"fc", "attribute"}, func(b *kernels.Binding) { b.Op.Attr = graph.NormAttr{} }},
		{"missing operand", []string{"fc", "w"}, func(b *kernels.Binding) { b.Op.In[1] = graph.NoBuf }},
		{"no such buffer", []string{"fc", "99"}, func(b *kernels.Binding) { b.Op.In[1] = 99 }},
		{"mode", []string{"fc", "y", "accum"}, func(b *kernels.Binding) { b.Op.Out[0].Mode = graph.Accum }},
		{"too few places", []string{"fc", "1 inputs"}, func(b *kernels.Binding) { b.In = b.In[:1] }},
		{"no arena", []string{"fc", "input 1 (w)", "arena"}, func(b *kernels.Binding) { b.In[1] = device.Ptr{} }},
		{"outside the arena", []string{"fc", "input 1 (w)", "outside"}, func(b *kernels.Binding) { b.In[1].Off = 1<<20 - 4 }},
		{"negative offset", []string{"fc", "input 0 (x)", "outside"}, func(b *kernels.Binding) { b.In[0].Off = -4 }},
		{"short place", []string{"fc", "output 0 (y)", "44 bytes", "48"}, func(b *kernels.Binding) { b.Out[0].Len -= 4 }},
		{"unaligned", []string{"fc", "input 0"}, func(b *kernels.Binding) { b.In[0].Off = 2 }},
		{"output over input", []string{"fc", "output 0 (y)", "input 0 (x)", "overlap"}, func(b *kernels.Binding) { b.Out[0].Off = 8 }},
		{"workspace over output", []string{"fc", "workspace", "overlap"}, func(b *kernels.Binding) { b.Work.Off = 1 << 17 }},
		{"no workspace", []string{"fc", "workspace"}, func(b *kernels.Binding) { b.Op.Work, b.Work = graph.NoBuf, device.Ptr{} }},
		{"workspace too small", []string{"fc", "workspace"}, func(b *kernels.Binding) {
			b.Program.Buf(b.Op.Work).Shape[0] -= 64
			b.Work.Len -= 64
		}},
		{"unaligned workspace", []string{"fc", "workspace", "64"}, func(b *kernels.Binding) { b.Work.Off += 4 }},
		{"skip of the wrong size", []string{"fc", "skip"}, func(b *kernels.Binding) {
			b.Op.Skip = b.Program.AddBuffer(graph.Buffer{Name: "skip", DType: graph.I32, Shape: []int64{2}})
			b.Skip = device.Ptr{Arena: host, Len: 8}
		}},
		{"no program", []string{"program"}, func(b *kernels.Binding) { b.Program = nil }},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := good()
			c.f(&b)
			k, err := New(pl).Bind(b)
			require.Nil(t, k)
			require.Error(t, err)
			for _, w := range c.want {
				require.ErrorContains(t, err, w)
			}
		})
	}
}

// TestRunRefuses: invalid values that are only seen at execution end it with an error that names
// the operation.
func TestRunRefuses(t *testing.T) {
	pl := pool.New(1)
	defer pl.Close()
	for _, c := range []struct {
		kind graph.Kind
		want string
		f    func(o *operation)
	}{
		{graph.Embed, "Tokens[0] is -1", func(o *operation) { set(o, o.Op().In[0], 0, int32(-1)) }},
		{graph.CrossEntropy, "Targets[0] is 1000000", func(o *operation) { set(o, o.Op().In[1], 0, int32(1e6)) }},
		{graph.HeadLoss, "Targets[0] is -2", func(o *operation) { set(o, o.Op().In[2], 0, int32(-2)) }},
		{graph.HeadLSE, "Targets[0] is 1000000", func(o *operation) { set(o, o.Op().In[1], 0, int32(1e6)) }},
		{graph.SelectRow, "row is -1", func(o *operation) { set(o, o.Op().In[1], graph.KeyRow, int64(-1)) }},
		{graph.RopeAt, "the position of row 0 is -1", func(o *operation) { set(o, o.Op().In[1], 0, int32(-1)) }},
		{graph.AttentionCached, "row 0 of sequence 0 is at position 1000000", func(o *operation) { set(o, o.Op().In[len(o.Op().In)-2], 0, int32(1e6)) }},
		{graph.AttentionCached, "sequence 0 is in slot -1", func(o *operation) { set(o, o.Op().In[len(o.Op().In)-1], graph.KeySlot, int64(-1)) }},
		{"adamw", "BC1", func(o *operation) { set(o, o.Op().In[2], graph.HyperBC1, float64(0)) }},
	} {
		t.Run(string(c.kind), func(t *testing.T) {
			ctx := devcpu.New(0, devcpu.Options{})
			var o *operation
			for seed := uint64(0); o == nil || o.Op().Skip != graph.NoBuf || c.kind == "adamw" && !trains(o); seed++ {
				o = newOperation(c.kind, rand.New(rand.NewPCG(seed, 9)))
			}
			c.f(o)
			err := launch(t, ctx, o.bind(t, ctx, pl))
			require.ErrorContains(t, err, c.want)
			require.ErrorContains(t, err, "op")
			require.NoError(t, ctx.Close())
		})
	}
}

// trains reports whether the rank holds a trainable element.
func trains(o *operation) bool {
	b := &binding{Binding: kernels.Binding{Program: o.P, Op: o.Op(), Coord: []int{o.Rank}}}
	spans, _ := b.spans(o.Op().Attr.(graph.UpdateAttr).Shard)
	return len(spans) > 0
}

// TestShardsAreTheWhole: updates and sums of squares over the shards of a unit equal those of the
// complete unit, bit for bit.
func TestShardsAreTheWhole(t *testing.T) {
	pl := pool.New(2)
	defer pl.Close()
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 50))
		u := optest.Unit(rng)
		full, world := u.Units[0].FlatLen, u.WorldSize()
		data := make([][]float32, 4) // g, p, m, v
		for i := range data {
			data[i] = make([]float32, full)
			for k := range data[i] {
				data[i][k] = float32(math.Abs(rng.NormFloat64()))
			}
		}
		// step returns p's bytes after an update, and the gradient's sum of squares, for rank's
		// shard or, with rank −1, for the complete unit.
		step := func(rank int) ([]byte, exact.Accumulator) {
			a, lo := graph.ShardAttr{Axis: -1, Len: full}, int64(0)
			coord := 0
			if rank >= 0 {
				a = graph.ShardAttr{Axis: 0, Len: full / int64(world)}
				lo, coord = int64(rank)*a.Len, rank
			}
			p := &graph.Program{Mesh: u.Mesh, Params: u.Params, Units: u.Units}
			var id []graph.BufID
			for _, name := range []string{"g", "p", "m", "v"} {
				id = append(id, p.AddBuffer(graph.Buffer{Name: name, Shape: []int64{a.Len}}))
			}
			coef := p.AddBuffer(graph.Buffer{Name: "coef", Shape: []int64{1}})
			p.Hyper = p.AddBuffer(graph.Buffer{Name: "hyper", DType: graph.F64, Shape: []int64{graph.NumHyper}})
			acc := p.AddBuffer(graph.Buffer{Name: "acc", DType: graph.I64, Shape: []int64{exact.Limbs}})
			op := graph.Op{Work: graph.NoBuf, Skip: graph.NoBuf}
			sq, adam := op, op
			sq.Kind, sq.Name, sq.Attr = graph.SqSum, "sq", a
			sq.In, sq.Out = id[:1], []graph.Out{{Buf: acc, Mode: graph.Accum}}
			adam.Kind, adam.Own, adam.Name = "adamw", zero.Operation("adamw"), "adam"
			adam.Attr = graph.UpdateAttr{Shard: a, Beta1: 0.9, Beta2: 0.99, Eps: 1e-8, Decay: 0.1}
			adam.In = []graph.BufID{id[0], coef, p.Hyper}
			for _, q := range id[1:] {
				adam.Out = append(adam.Out, graph.Out{Buf: q, Mode: graph.ReadWrite})
			}
			p.Sections = []graph.Section{{Name: "s", Phases: []graph.Phase{{Ops: []graph.Op{sq, adam}}}}}
			b := bindProgram(t, p, pl, coord)
			c := inputs{
				f32: map[graph.BufID][]float32{coef: {0.5}},
				f64: map[graph.BufID][]float64{p.Hyper: make([]float64, graph.NumHyper)},
				i64: map[graph.BufID][]int64{acc: make([]int64, exact.Limbs)},
			}
			h := c.f64[p.Hyper]
			h[graph.HyperLR], h[graph.HyperBC1], h[graph.HyperBC2] = 0.01, 0.1, 0.01
			for i, q := range id {
				c.f32[q] = data[i][lo : lo+a.Len]
			}
			b.load(t, c)
			b.run(t)
			after, err := devcpu.Bytes(b.ptr(id[1]))
			require.NoError(t, err)
			limbs, err := devcpu.Slice[int64](b.ptr(acc))
			require.NoError(t, err)
			after, sum := slices.Clone(after), exact.Accumulator(slices.Clone(limbs))
			require.NoError(t, b.ctx.Close())
			return after, sum
		}
		want, wantSum := step(-1)
		var got []byte
		total := make(exact.Accumulator, exact.Limbs)
		for r := range world {
			part, sum := step(r)
			got = append(got, part...)
			total.Merge(sum)
		}
		require.True(t, slices.Equal(want, got), "seed %d", seed)
		require.Equal(t, wantSum.Float64(), total.Float64(), "seed %d", seed)
	}
}
