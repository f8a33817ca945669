package sass_test

import (
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/internal/testkit/sass"
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

// packed are the kernels whose time is memory's: elements go by in packs of 16 bytes.
var packed = []string{
	"add", "sub", "mul", "scale", "sum_grad", "swiglu", "swiglu_grad", "dropout", "fill_1", "fill_2", "fill_4", "fill_8",
	"embed", "embed_grad", "add_pos", "add_pos_grad", "rope", "add_bias", "adamw", "lamb_direction", "lamb_apply", "momentum",
	"sum_parts", "sum_ranks", "sum_leaves", "im2col", "col2im", "maxpool", "maxpool_grad",
	"layernorm", "rmsnorm", "add_layernorm", "add_rmsnorm", "norm_grad", "norm_grad_wide",
}

func streams(kernel string) bool {
	return strings.HasPrefix(kernel, "act_") || strings.HasPrefix(kernel, "cast_") || slices.Contains(packed, family(kernel))
}

var rules = []rule{
	{"no local memory: no spill, no indexed array", func(r *sass.Row) bool { return r.Stack == 0 && r.Local == 0 }, map[string]string{
		"attention":     "fp32 sums of a tile of 64 by 128 fill the registers of two blocks; one, with twice as many, would hide less",
		"attention_dkv": "as attention", "attention_dq": "as attention",
		"flash_backward": "a few words, once a tile: four sums of a tile fill the registers",
		"norm_grad":      "fp16, a few words: four blocks of a row of 1,600 shall be on a multiprocessor",
		"norm_grad_wide": "rows of more than 4,096 columns: 1,024 threads with 16 sums each",
	}},
	{"what local memory there is, is 48 bytes at most", func(r *sass.Row) bool { return r.Stack <= 48 }, map[string]string{
		"norm_grad_wide": "as above",
	}},
	{"no division of 64-bit integers", func(r *sass.Row) bool { return r.Divide64 == 0 }, nil},
	{"a kernel reads or writes 16 bytes at a time", func(r *sass.Row) bool { return r.Load16+r.Store16 > 0 }, map[string]string{
		"attention": "16 bits, cards older than 8.0 and widths that flash.cuh does not have: by fours, as fp32's tiles lie", "attention_dq": "as attention", "attention_dkv": "as attention",
		"attention_delta": "a warp a query, 128 bytes together: the order of its sum is the lanes'",
		"norm_lanes":      "512 numbers of a column, once",
		"softmax":         "16 bits: the order of its sums is by four columns", "softmax_grad": "as softmax",
		"clip_coef": "one thread", "overflow_check": "one thread", "loss_scale_update": "one thread", "novograd_moments": "a thread a parameter",
		"sum_total": "a number of fp64 for 65,536 elements", "loss_sum": "a number of fp64 for a row of logits",
		"select_row": "one row of an operand", "rope_table": "positions by frequencies, once an operation; sines of fp64 take far longer",
	}},
	{"packs are stored 16 bytes at a time", func(r *sass.Row) bool { return !streams(r.Kernel) || r.Store16 > 0 }, nil},
	{"packs are loaded 16 bytes at a time", func(r *sass.Row) bool {
		return !streams(r.Kernel) || r.Load16 > 0 || strings.HasPrefix(r.Kernel, "fill_")
	}, nil},
	{"sums of columns go by 16 bytes, their 16-bit results by fours at least", func(r *sass.Row) bool {
		f := family(r.Kernel)
		return f != "columns" && f != "column_parts" || r.Load16 > 0 && r.Store16+r.Store8 > 0
	}, nil},
	{"updates go by 16 bytes, of 16-bit gradients and copies too", func(r *sass.Row) bool {
		return !slices.Contains([]string{"adamw", "lamb_direction", "lamb_apply", "momentum"}, r.Kernel) || r.Store8 == 0 && r.Load16 >= r.Store16+2
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
	{"attention's backward keeps 16 bytes at most in local memory", func(r *sass.Row) bool {
		return family(r.Kernel) != "flash_backward" || r.Stack <= 16 && r.Local <= 6
	}, nil},
	{"sums in double read 16 bytes at a time, eight times in a row for each type", func(r *sass.Row) bool {
		return (r.Kernel != "sqsum" || r.Load16 >= 3*8) && (family(r.Kernel) != "sum_pieces" || r.Load16 >= 8)
	}, nil},
}
