package deps

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var aFlag = regexp.MustCompile(`--[a-z%]`)

// Flags are the command's: what the library says names fields.
func TestTheLibraryKnowsNoFlags(t *testing.T) {
	literals := 0
	for _, pkg := range []string{"", "train", "search", "plan", "calibration", "run", "exec", "graph", "model", "zero", "fsdp", "recompute", "memplan", "precision"} {
		files, err := filepath.Glob(filepath.Join("..", "..", pkg, "*.go"))
		require.NoError(t, err)
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			set := token.NewFileSet()
			file, err := parser.ParseFile(set, name, nil, 0)
			require.NoError(t, err)
			ast.Inspect(file, func(n ast.Node) bool {
				if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
					literals++
					require.NotRegexp(t, aFlag, lit.Value, "%s: a sentence of the library names a flag", set.Position(lit.Pos()))
				}
				return true
			})
		}
	}
	require.Greater(t, literals, 1000)
}
