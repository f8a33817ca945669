package saving

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
)

// Arithmetic names what decides the last bits of a step beside the settings: on the CPU
// the instructions of bf16 products, since all else there has the same bits at every
// SIMD level; on a GPU its kind, by which cuBLASLt chooses the order of sums.
func Arithmetic(c *config.Config, gpu *gpus.GPU) string {
	switch {
	case gpu != nil:
		return "CUDA on " + gpu.Product
	case strings.EqualFold(c.PrecisionName(), "bf16"):
		return bf16Products + gemm.Rounding(c.PortableBF16())
	}
	return "CPU"
}

// bf16Products is how Arithmetic begins for them; the rule of rounding follows.
const bf16Products = "CPU, bf16 products by "

// otherArithmetic is the line about a checkpoint whose run goes on with other last bits
// than it would have had on the machine that wrote it; "" where it doesn't, or where
// that can't be known. Another rule for bf16 products is refused unless
// Config.AcceptChanges. A change of Config.Precision is not told here: it has a line of
// its own.
func otherArithmetic(name string, was Record, now string, c *config.Config) (string, error) {
	if was.Arithmetic == "" || was.Arithmetic == now || was.Settings["precision"] != strings.ToLower(c.PrecisionName()) {
		return "", nil
	}
	before, wasBF16 := strings.CutPrefix(was.Arithmetic, bf16Products)
	if after, isBF16 := strings.CutPrefix(now, bf16Products); wasBF16 && isBF16 && !c.AcceptChanges {
		remedy := "go on on such a CPU"
		switch before {
		case gemm.Rounding(true):
			remedy = "give Config.BF16Rounding portable, which is that rule on every CPU"
		case gemm.Rounding(false):
			remedy = "leave Config.BF16Rounding out, which is that rule on this CPU"
		}
		return "", config.RefuseField("AcceptChanges", "resume: %s was made by a run whose sums of bf16 products round by %.80s, and here they would by %s: %s, or give Config.AcceptChanges to go on with other last bits",
			name, before, after, remedy)
	}
	return fmt.Sprintf("%s was computed on another kind of machine (%.80q; this one: %q): from here on losses may differ in their last bits from those of a run that stayed there",
		name, was.Arithmetic, now), nil
}

// ComputedInFP32 is the line of generate and eval, which compute in fp32, about weights, of a
// checkpoint or of a model's folder (nil), that were trained or are stored in 16 bits; "": neither.
func ComputedInFP32(saved *checkpoint.Checkpoint, r checkpoint.Tensors, names []string) string {
	if saved != nil {
		var was Record
		if json.Unmarshal(saved.Manifest.Run, &was) != nil {
			return ""
		}
		if p := was.Settings["precision"]; p == "bf16" || p == "fp16" {
			return fmt.Sprintf("computed in fp32; its run trained in %s, whose own losses differ from these by the rounding of 16 bits", p)
		}
		return ""
	}
	for _, name := range names {
		if found, ok := r.Tensor(name); ok && (found.DType == safetensors.BF16 || found.DType == safetensors.F16) {
			return fmt.Sprintf("computed in fp32; the weights are stored as %s", found.DType)
		}
	}
	return ""
}
