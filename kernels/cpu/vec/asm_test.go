package vec

import (
	"bufio"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// AVX2 functions must not use AVX-512's registers. The generator does not spill, and would use them
// if a kernel kept too many values alive.
func TestAVX2FunctionsUseAVX2Registers(t *testing.T) {
	files, err := filepath.Glob("*_amd64.s")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	bad := regexp.MustCompile(`\b(Z\d+|K[0-7]|[XY](1[6-9]|2\d|3[01]))\b`)
	checked := 0
	for _, name := range files {
		f, err := os.Open(name)
		require.NoError(t, err)
		function := ""
		for s := bufio.NewScanner(f); s.Scan(); {
			line := s.Text()
			if strings.HasPrefix(line, "TEXT") {
				function = line
				if strings.Contains(line, "AVX2(") {
					checked++
				}
			}
			if strings.Contains(function, "AVX2(") {
				require.NotRegexp(t, bad, line, "%s: %s", name, function)
			}
		}
		require.NoError(t, f.Close())
	}
	require.Greater(t, checked, 50)
}
