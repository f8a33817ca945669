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

// Arithmetic identifies the arithmetic that decides the last bits of a step beside the settings. On
// the CPU it is the instructions of bf16 products, since all else there has the same bits at every
// SIMD level. On a GPU it is the GPU's model, by which cuBLASLt chooses the order of sums.
func Arithmetic(c *config.Config, gpu *gpus.GPU) string {
	switch {
	case gpu != nil:
		return "CUDA on " + gpu.Product
	case strings.EqualFold(c.PrecisionName(), "bf16"):
		return bf16Products + gemm.Rounding(c.PortableBF16())
	}
	return "CPU"
}

// bf16Products is the beginning of Arithmetic for bf16 products; the rounding rule follows.
const bf16Products = "CPU, bf16 products by "

// otherArithmetic returns a note if the resumed run gets other last bits than it would have had on
// the machine that wrote the checkpoint. It returns "" if the bits are the same, or if that can't
// be known. Another rule for bf16 products is refused unless Config.AcceptChanges. A change of
// Config.Precision has a separate note.
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

// ComputedInFP32 returns the note of generate and eval, which compute in fp32, about weights that
// were trained or are stored in 16 bits; "" if they were not. saved is nil for weights of a model's
// folder.
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
