package cli

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEscapedValuesKeepTheirQuotes(t *testing.T) {
	t.Parallel()
	require.Equal(t, `a\"`, Cut(`a"`))
	require.Equal(t, `\"\x1b[31m`, short("\"\x1b[31m"))
	require.Equal(t, strings.Repeat("x", maxQuoted)+"…", short(strings.Repeat("x", maxQuoted+1)))
	require.Equal(t, `--model: no "a\n\""`, tame("--model: no \"a\n\"\"", []string{"a\n\""}))
	long := strings.Repeat("x", 257)
	require.Equal(t, "of "+short(long), tame("of "+long, nil))
	advice := "give --lora 'r=4,targets=" + strings.Repeat("model.layers.{0-2}.mlp.up_proj.weight,", 9) + "b'"
	require.Equal(t, advice, tame(advice, []string{"r=4"}))
}
