package sass_test

import (
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/kernels/cuda/sass"
)

// A rule holds for every kernel that it is for, but those excepted by family, with why.
type rule struct {
	name   string
	holds  func(r *sass.Row) bool
	except map[string]string
}

// family is a kernel's name without the types of its elements.
func family(kernel string) string {
	for _, s := range []string{"_f32", "_bf16", "_f16", "_f64", "_i64"} {
		if rest, ok := strings.CutSuffix(kernel, s); ok {
			return family(rest)
		}
	}
	return kernel
}

// streams are the kernels whose time is memory's: elements go by in packs of 16 bytes,
// or of four elements (8 bytes of 16-bit ones) where the order of a sum is by four.
var (
	packed = []string{
		"add", "sub", "mul", "scale", "sum_grad", "swiglu", "swiglu_grad", "dropout", "fill_1", "fill_2", "fill_4", "fill_8",
		"embed", "add_pos", "add_pos_grad", "rope", "add_bias", "adamw", "lamb_direction", "lamb_apply", "momentum",
	}
	byFours = []string{"layernorm", "rmsnorm", "add_layernorm", "add_rmsnorm", "norm_dx"}
)

func streams(kernel string) bool {
	return strings.HasPrefix(kernel, "act_") || strings.HasPrefix(kernel, "cast_") || slices.Contains(packed, family(kernel))
}

var rules = []rule{
	{"no local memory: no spill, no indexed array", func(r *sass.Row) bool { return r.Stack == 0 && r.Local == 0 }, map[string]string{
		"attention":      "fp32 sums of a tile of 64 by 128 fill the registers; less in flight would cost more",
		"attention_dq":   "as attention",
		"attention_dkv":  "as attention",
		"dropout":        "fp16 rounds beside 32 random words: two of them wait, for one access of 16 bytes",
		"embed_grad":     "eight words of one type on one architecture",
		"flash_forward":  "two words on 8.0 and four on 9.0, for three blocks on a multiprocessor, heads of 128",
		"flash_backward": "words of addresses, once a tile, heads of 80 and 96: four sums of a tile fill the registers",
		"maxpool_grad":   "three nested windows; a small part of a vision model",
	}},
	{"no division of 64-bit integers", func(r *sass.Row) bool { return r.Divide64 == 0 }, map[string]string{
		"im2col": "indices of five dimensions; the product after it takes far longer", "col2im": "as im2col",
		"maxpool": "as im2col", "maxpool_grad": "as im2col",
		"attention_delta": "a warp a query, once", "flash_delta": "16 threads a query, once",
		"attention": "a block's place, once", "attention_dq": "as attention", "attention_dkv": "as attention",
	}},
	{"packs are stored 16 bytes at a time", func(r *sass.Row) bool { return !streams(r.Kernel) || r.Store16 > 0 }, nil},
	{"packs are loaded 16 bytes at a time", func(r *sass.Row) bool {
		return !streams(r.Kernel) || r.Load16 > 0 || strings.HasPrefix(r.Kernel, "fill_")
	}, nil},
	{"rows of norms go by fours", func(r *sass.Row) bool {
		if !slices.Contains(byFours, family(r.Kernel)) {
			return true
		}
		if strings.HasSuffix(r.Kernel, "_f32") {
			return r.Load16 > 0 && r.Store16 > 0
		}
		return r.Load8 > 0 && r.Store8 > 0
	}, nil},
	{"sums of columns go by 16 bytes, their 16-bit results by fours at least", func(r *sass.Row) bool {
		f := family(r.Kernel)
		return f != "columns" && f != "column_parts" || r.Load16 > 0 && r.Store16+r.Store8 > 0
	}, nil},
	{"an optimizer's 16-bit gradients and copies go by fours", func(r *sass.Row) bool {
		return !slices.Contains([]string{"adamw", "lamb_apply", "momentum"}, r.Kernel) || r.Load8 > 0 && r.Store8 > 0
	}, nil},
	{"attention of 16 bits multiplies on the tensor cores, from tiles that asynchronous copies fill", func(r *sass.Row) bool {
		switch family(r.Kernel) {
		case "flash_forward":
			return r.Tensor > 0 && r.Async > 0 && r.Store16 > 0 && r.Registers <= 168
		case "flash_backward":
			return r.Tensor > 0 && r.Async > 0 && r.Store16 > 0 && r.Load16 > 0 && (r.Source != "flash_64.cu" || r.Registers <= 168)
		}
		return true
	}, nil},
	{"attention's backward waits in no local memory, heads of 64 and 128", func(r *sass.Row) bool {
		return family(r.Kernel) != "flash_backward" || r.Source != "flash_64.cu" && r.Source != "flash_128.cu" || r.Stack == 0 && r.Local == 0
	}, nil},
	{"a norm reads 16 elements before it adds the first", func(r *sass.Row) bool { return r.Kernel != "sqsum" || r.Load4 >= 3*16 }, nil},
}
