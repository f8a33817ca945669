package cpu

import (
	"crypto/sha256"
	"encoding/binary"
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
	"github.com/spillway-ml/spillway/internal/testkit/alloctest"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/internal/testkit/optest"
	"github.com/spillway-ml/spillway/kernels/cpu/exact"
	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/zero"
)

// operation is a random operation whose buffers are placed and which is bound.
type operation struct {
	*optest.Operation
	offsets []int64
	arena   device.Arena
}

func newOperation(kind graph.Kind, rng *rand.Rand) *operation {
	return newOperationOf(graph.F32, kind, rng)
}

// types are the possible types of an operation's values.
var types = []graph.DType{graph.F32, graph.BF16, graph.F16}

// newOperationOf draws an operation with values of the given type where its kind allows it.
func newOperationOf(dt graph.DType, kind graph.Kind, rng *rand.Rand) *operation {
	return &operation{Operation: optest.New(kind, rng, optionsOf(dt))}
}

func optionsOf(dt graph.DType) optest.Options {
	return optest.Options{Target: graph.CPUTarget(), Half: dt != graph.F32, F16: dt == graph.F16}
}

// products are the kinds whose bf16 sums depend on the CPU's bf16 instructions, if it has any.
var products = []graph.Kind{graph.Linear, graph.LinearAct, graph.LinearGradX, graph.LinearGradAct, graph.LinearGradW, graph.LinearGradWB, graph.HeadLoss, graph.HeadLossGrad, graph.HeadStats, graph.HeadSliceGrad}

func exactly(dt graph.DType, kind graph.Kind) bool {
	return dt != graph.BF16 || !slices.Contains(products, kind) || gemm.Widened(gemm.BF16)
}

// set changes one element of an operand's initial contents.
func set[T any](o *operation, id graph.BufID, i int, v T) { optest.Values[T](o.Before[id])[i] = v }

// bind places the operation's buffers in a poisoned arena and binds the operation.
func (o *operation) bind(t testing.TB, ctx *devcpu.Context, pl *pool.Pool) device.Kernel {
	var size int64
	o.offsets, size = o.Layout(workAlign)
	var err error
	o.arena, err = ctx.Alloc(graph.Device, size)
	require.NoError(t, err)
	for id, v := range o.Before {
		copy(o.bytes(t, id), v)
	}
	k, err := New(pl).Bind(o.Binding(o.arena, o.offsets))
	require.NoError(t, err)
	return k
}

// bytes returns an operand's memory.
func (o *operation) bytes(t testing.TB, id graph.BufID) []byte {
	b, err := devcpu.Bytes(device.Ptr{Arena: o.arena, Off: o.offsets[id], Len: o.P.Buf(id).Bytes()})
	require.NoError(t, err)
	return b
}

// launch runs k on a stream of a device that checks its writes.
func launch(t testing.TB, ctx *devcpu.Context, k device.Kernel) error {
	s, err := ctx.NewStream(graph.Compute)
	require.NoError(t, err)
	if err := s.Launch(k); err != nil {
		return err
	}
	return s.Sync()
}

// unbound are the kinds that the executor binds itself.
var unbound = []graph.Kind{graph.AllGather, graph.ReduceScatter, graph.AllReduce, graph.AllToAll, graph.Send, graph.Recv, graph.Copy, graph.Join}

// kinds returns the kinds of the kind table, and of update rules with kernels in this package.
func kinds() []graph.Kind {
	list := graph.Kinds()
	for _, op := range zero.Operations() {
		if op.Definition().Library {
			list = append(list, op.Kind())
		}
	}
	slices.Sort(list)
	return list
}

// TestEveryKindEqualsInterpreter runs random operations of every kind on the
// device and compares every byte of every operand with the interpreter's.
func TestEveryKindEqualsInterpreter(t *testing.T) {
	for _, kind := range kinds() {
		if slices.Contains(unbound, kind) {
			continue
		}
		require.Contains(t, binders, kind)
		require.Contains(t, optest.Kinds(), kind, "the test has no operations of this kind")
		for _, dt := range types {
			t.Run(fmt.Sprintf("%s/%v", kind, dt), func(t *testing.T) { equalsInterpreter(t, dt, kind) })
		}
	}
}

func equalsInterpreter(t *testing.T, dt graph.DType, kind graph.Kind) {
	for seed := range long.Or[uint64](8, 24) {
		rng := rand.New(rand.NewPCG(seed, 1))
		opts := optionsOf(dt)
		opts.Large = opts.Half && seed%4 == 3 // beyond the blocks that are widened at a time
		o := &operation{Operation: optest.New(kind, rng, opts)}
		require.NoError(t, graph.Check(o.P, o.Op()), "seed %d", seed)
		want := interpret(t, o)
		for _, threads := range []int{1, 3} {
			compare(t, o, want, threads, seed, exactly(dt, kind))
		}
	}
}

// TestWidenedProductsEqualInterpreter: at a level without bf16 instructions, bf16 products give the
// interpreter's bits.
func TestWidenedProductsEqualInterpreter(t *testing.T) {
	const child = "SPILLWAY_TEST_WIDENED"
	if os.Getenv(child) != "" {
		require.True(t, gemm.Widened(gemm.BF16))
		for _, kind := range products {
			equalsInterpreter(t, graph.BF16, kind)
		}
		return
	}
	if testing.Short() {
		t.Skip("starts a process")
	}
	l := min(level.AVX2, level.Best())
	cmd := exec.Command(os.Args[0], "-test.run=^TestWidenedProductsEqualInterpreter$")
	cmd.Env = append(os.Environ(), level.Env+"="+l.String(), child+"=1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

func interpret(t *testing.T, o *operation) map[graph.BufID][]byte {
	want, err := o.Interpret()
	require.NoError(t, err)
	return want
}

func compare(t *testing.T, o *operation, want map[graph.BufID][]byte, threads int, seed uint64, exactly bool) {
	ctx := devcpu.New(0, devcpu.Options{Poison: true, Checker: devcpu.NewChecker()})
	defer func() { require.NoError(t, ctx.Close()) }()
	pl := pool.New(threads)
	defer pl.Close()
	k := o.bind(t, ctx, pl)
	require.NoError(t, launch(t, ctx, k), "seed %d", seed)
	for id, w := range want {
		got := o.bytes(t, id)
		if !exactly && near(o.P.Buf(id).DType, got, w) {
			continue
		}
		if !optest.SameBits(o.P.Buf(id).DType, got, w) {
			require.Failf(t, "bits differ", "seed %d, %d threads, %s of %+v attr %+v:\n got %v\nwant %v", seed, threads,
				o.P.Buf(id).Name, o.Op(), o.Op().Attr, optest.Head(o.P.Buf(id).DType, got), optest.Head(o.P.Buf(id).DType, w))
		}
	}
}

// TestHeadInOneChunk: if all rows of a head fit in one chunk, its gradients have the interpreter's
// bits.
func TestHeadInOneChunk(t *testing.T) {
	found := map[graph.DType]bool{}
	for seed := uint64(0); len(found) < 2; seed++ {
		dt := []graph.DType{graph.F16, graph.BF16}[seed%2]
		o := newOperationOf(dt, graph.HeadLossGrad, rand.New(rand.NewPCG(seed, 4)))
		n := int(o.P.Buf(o.Op().In[2]).Elems())
		if found[dt] || n <= headRows || headRowsOf(o.P, o.Op()) != n {
			continue
		}
		found[dt] = true
		want := interpret(t, o)
		for _, threads := range []int{1, 3} {
			compare(t, o, want, threads, seed, exactly(dt, graph.HeadLossGrad))
		}
	}
}

// near reports whether floats differ by at most a few bf16 units of the largest value, as after
// rounding one term of a sum.
func near(dt graph.DType, got, want []byte) bool {
	g, w := values(dt, got), values(dt, want)
	largest := 0.0
	for _, v := range w {
		if !math.IsInf(v, 0) && !math.IsNaN(v) {
			largest = max(largest, math.Abs(v))
		}
	}
	for i, v := range w {
		if g[i] != v && !(math.IsNaN(g[i]) && math.IsNaN(v)) && !(math.Abs(g[i]-v) <= (math.Abs(v)+largest)/128) {
			return false
		}
	}
	return w != nil
}

// values returns the elements of a float buffer, or nil for other types.
func values(dt graph.DType, b []byte) []float64 {
	var v []float64
	switch dt {
	case graph.F64:
		return optest.Values[float64](b)
	case graph.F32:
		for _, x := range optest.Values[float32](b) {
			v = append(v, float64(x))
		}
	case graph.BF16:
		for _, x := range optest.Values[uint16](b) {
			v = append(v, float64(num.FromBF16(x)))
		}
	case graph.F16:
		for _, x := range optest.Values[uint16](b) {
			v = append(v, float64(num.FromF16(x)))
		}
	}
	return v
}

// TestNoAllocation: running a bound kernel allocates nothing.
func TestNoAllocation(t *testing.T) {
	pl := pool.New(2)
	defer pl.Close()
	for _, dt := range types {
		for _, kind := range optest.Kinds() {
			ctx := devcpu.New(0, devcpu.Options{})
			o := newOperationOf(dt, kind, rand.New(rand.NewPCG(7, 7)))
			k := o.bind(t, ctx, pl).(devcpu.Kernel)
			n := alloctest.PerRun(10, func() {
				if k.Run() != nil {
					panic("failed")
				}
			})
			require.Zero(t, n, "%s of %v allocates", kind, dt)
			require.NoError(t, ctx.Close())
		}
	}
}

// TestLevelsAgree runs the same operations at every SIMD level of this CPU. Each level needs a
// process, since a process chooses its level once.
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

// digest returns a hash of the results of operations of every kind.
func digest(t *testing.T) string {
	h := sha256.New()
	var bits []byte
	known := func(v float32) []byte {
		if v != v {
			v = 0 // NaN payloads are undefined
		}
		bits = binary.LittleEndian.AppendUint32(bits[:0], math.Float32bits(v))
		return bits
	}
	pl := pool.New(2)
	defer pl.Close()
	for _, kind := range kinds() {
		if slices.Contains(unbound, kind) {
			continue
		}
		for seed := range long.Or[uint64](9, 18) {
			dt := types[seed%3]
			if dt == graph.BF16 && slices.Contains(products, kind) {
				continue // rounding depends on the level's instructions
			}
			o := newOperationOf(dt, kind, rand.New(rand.NewPCG(seed, 2)))
			ctx := devcpu.New(0, devcpu.Options{})
			k := o.bind(t, ctx, pl)
			require.NoError(t, launch(t, ctx, k))
			for id := range o.P.Buffers {
				b := o.bytes(t, graph.BufID(id))
				switch o.P.Buffers[id].DType {
				case graph.U8: // workspace: its contents are undefined
				case graph.F32:
					for _, v := range optest.Values[float32](b) {
						h.Write(known(v))
					}
				case graph.BF16, graph.F16:
					for _, v := range values(o.P.Buffers[id].DType, b) {
						h.Write(known(float32(v)))
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

// TestWorkspaceOfTarget: graph.CPUTarget's numbers are equal to the kernels' own.
func TestWorkspaceOfTarget(t *testing.T) {
	target := graph.CPUTarget()
	require.EqualValues(t, exact.Limbs, target.Limbs)
	require.EqualValues(t, workAlign, target.Align)
	require.EqualValues(t, headRows, target.HeadRows)
	require.Zero(t, target.HeadRows%target.Product.KC)
	rng := rand.New(rand.NewPCG(3, 3))
	for _, dt := range types {
		workspaceOfTarget(t, target, dt, rng)
	}
}

func workspaceOfTarget(t *testing.T, target graph.Target, dt graph.DType, rng *rand.Rand) {
	needed := map[graph.Kind]bool{}
	for _, kind := range optest.Kinds() {
		for range 40 {
			p, op, ok := optest.Big(kind, rng, optionsOf(dt))
			if !ok {
				o := newOperationOf(dt, kind, rng)
				want := workspace(o.P, o.Op())
				if a, ok := o.Op().Attr.(graph.NormAttr); !ok || !a.PlusOne { // computing 1 + gamma needs workspace
					require.Zero(t, want, "%s", kind)
				}
				require.Equal(t, want, target.Workspace(o.P, o.Op()), "%s", kind)
				break
			}
			require.NoError(t, graph.Check(p, op))
			want := workspace(p, op)
			require.Equal(t, want, target.Workspace(p, op), "%s %+v in %v out %v", kind, op.Attr, op.In, op.Out)
			require.Zero(t, want%target.Align)
			needed[kind] = needed[kind] || want > 0
		}
	}
	for kind, n := range needed {
		require.True(t, n, "%s never needed workspace", kind)
	}
}
