package saving

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
)

// TestOtherArithmeticIsTold checks that a resume on a machine that rounds differently is refused
// or, with AcceptChanges, noted. A change of precision gives no such note, because it is reported
// as a changed setting.
func TestOtherArithmeticIsTold(t *testing.T) {
	c := config.Default()
	c.Precision = "BF16"
	now := bf16Products + "this"
	was := Record{Arithmetic: now, Settings: map[string]string{"precision": "bf16"}}
	told := func(now string) string {
		line, err := otherArithmetic("a", was, now, &c)
		require.NoError(t, err)
		return line
	}
	require.Empty(t, told(now))
	was.Arithmetic = bf16Products + "that"
	_, err := otherArithmetic("a", was, now, &c)
	require.EqualError(t, err, "resume: a was made by a run whose sums of bf16 products round by that, and here they would by this: go on on such a CPU, or give Config.AcceptChanges to go on with other last bits")
	was.Arithmetic = bf16Products + "float32"
	_, err = otherArithmetic("a", was, now, &c)
	require.ErrorContains(t, err, "give Config.BF16Rounding portable, which is that rule on every CPU, or give Config.AcceptChanges")
	if native := gemm.Rounding(false); native != "float32" {
		was.Arithmetic = bf16Products + native
		_, err = otherArithmetic("a", was, bf16Products+"float32", &c)
		require.ErrorContains(t, err, "leave Config.BF16Rounding out, which is that rule on this CPU")
		was.Arithmetic = bf16Products + "float32"
	}
	c.AcceptChanges = true
	require.Equal(t, "a was computed on another kind of machine (\"CPU, bf16 products by float32\"; this one: \""+now+
		"\"): from here on losses may differ in their last bits from those of a run that stayed there", told(now))
	c.AcceptChanges = false
	require.Contains(t, told("CUDA on a card"), "another kind of machine")
	c.Precision = "fp32"
	require.Empty(t, told("CPU"))
	c.Precision, was.Arithmetic = "bf16", ""
	require.Empty(t, told(now), "an older checkpoint")
}

// TestPortableArithmetic checks that the portable rounding rule is the same on every CPU and is
// part of the settings that ranks and checkpoints compare.
func TestPortableArithmetic(t *testing.T) {
	c := config.Default()
	c.Precision, c.BF16Rounding = "bf16", "portable"
	require.Equal(t, bf16Products+"float32", Arithmetic(&c, nil))
	require.Equal(t, "portable", Settings(&c)["bf16-rounding"])
	c.BF16Rounding = "native"
	require.NotContains(t, Settings(&c), "bf16-rounding")
}
