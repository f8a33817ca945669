package saving

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A run that goes on where products round otherwise says so; a change of precision is told
// as that.
func TestOtherArithmeticIsTold(t *testing.T) {
	now := "CPU, bf16 products by this"
	was := Record{Arithmetic: now, Settings: map[string]string{"precision": "bf16"}}
	require.Empty(t, otherArithmetic("a", was, now, "bf16"))
	was.Arithmetic = "CPU, bf16 products by another"
	require.Equal(t, "a was computed on another kind of machine (\"CPU, bf16 products by another\"; this one: \""+now+
		"\"): from here on losses may differ in their last bits from those of a run that stayed there", otherArithmetic("a", was, now, "bf16"))
	require.Empty(t, otherArithmetic("a", was, "CPU", "fp32"))
	was.Arithmetic = ""
	require.Empty(t, otherArithmetic("a", was, now, "bf16"), "an older checkpoint")
}
