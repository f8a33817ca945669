package cuda

import (
	"crypto/sha256"
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
)

// bindOwn prepares an operation that the user's program defines, with the GPU kernels of
// its definition (graph.CUDAKernel).
func bindOwn(b *binding) {
	def := b.Op.Own.Definition()
	if def.CUDA == nil {
		b.failf("the operation has no kernel for a GPU: its definition lacks CUDA")
		return
	}
	call := kernels.OwnCall(&b.Binding)
	params, err := kernels.OwnParams(&b.Binding)
	if err != nil {
		b.failf("%w", err)
		return
	}
	call.Params = params
	source, err := ownSource(def, call)
	if err != nil {
		b.failf("%w", err)
		return
	}
	// The hash distinguishes this source from definitions of the same kind in other programs or for
	// other types.
	name := fmt.Sprintf("%s-%x.cu", strings.ReplaceAll(string(def.Kind), "/", "-"), sha256.Sum256([]byte(source)))
	var work driver.Address
	if def.Work != nil {
		work = b.work(graph.CUDATarget().Workspace(b.Program, b.Op))
	}
	for _, l := range def.CUDA.Launches(call) {
		args := b.args()
		for i := range def.In {
			args.Pointer(b.in(i))
		}
		for i := range def.Out {
			args.Pointer(b.out(i))
		}
		if def.Work != nil {
			args.Pointer(work)
		}
		for i := range def.Out {
			args.Int32(b.accum(i))
		}
		if err := ownArgs(args, l.Args); err != nil {
			b.failf("launch of %s: %w", l.Kernel, err)
		}
		if l.Blocks < 0 || l.Threads < 1 || l.Threads > 1024 || l.Shared < 0 {
			b.failf("launch of %s: %d blocks of %d threads with %d bytes of shared memory; want 0 or more, 1 to 1024, 0 or more", l.Kernel, l.Blocks, l.Threads, l.Shared)
		}
		if b.err != nil {
			return
		}
		if l.Blocks == 0 {
			continue
		}
		f, err := b.lib.functionOf(name, func() (string, error) { return source, nil }, l.Kernel, l.Shared)
		if err != nil {
			b.failf("%w", err)
			return
		}
		b.kernel.steps = append(b.kernel.steps, &launch{f: f, grid: driver.Dim{X: uint32(l.Blocks), Y: 1, Z: 1},
			block: driver.Dim{X: uint32(l.Threads), Y: 1, Z: 1}, shared: l.Shared, args: args})
	}
}

// ctypes are the C names of element types in the prelude of user-defined kernels.
var ctypes = map[graph.DType]string{graph.F32: "float", graph.BF16: "bf16", graph.F16: "f16", graph.F64: "double", graph.I64: "i64", graph.I32: "int"}

// ownSource returns a source file: the prelude, the operands' types and the definition's
// text.
func ownSource(def *graph.Definition, call *graph.Call) (string, error) {
	text, err := sources.ReadFile("src/" + prelude)
	if err != nil {
		return "", fmt.Errorf("no kernel source %q", prelude)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "#line 1 \"%s\"\n%s", prelude, text)
	types := func(name string, list []graph.Tensor, sig []graph.Operand) {
		for i := range list {
			t := list[i].DType
			if !list[i].Present() {
				t = sig[i].Types[0] // the operand is absent: its pointer is 0
			}
			fmt.Fprintf(&b, "#define %s%d %s\n", name, i, ctypes[t])
		}
	}
	types("IN", call.In, def.In)
	types("OUT", call.Out, def.Out)
	fmt.Fprintf(&b, "#line 1 \"%s\"\n%s\n", def.Kind, def.CUDA.Source)
	return b.String(), nil
}

// ownArgs adds the scalar parameters that the definition passes to a launch.
func ownArgs(args *driver.Args, list []any) error {
	for i, v := range list {
		switch v := v.(type) {
		case int32:
			args.Int32(v)
		case int64:
			args.Int64(v)
		case float32:
			args.Float32(v)
		case float64:
			args.Float64(v)
		default:
			return fmt.Errorf("argument %d is %T, want int32, int64, float32 or float64", i, v)
		}
	}
	return nil
}
