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
}
