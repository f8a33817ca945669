package deps

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// mostLines is the longest function allowed without a stated reason: one screen.
const mostLines = 90

// reasons are the beginnings of the sentence that justifies a longer function, in its comment.
var reasons = []string{"Long function: ", "A table: "}

// Hand-written functions outside tests have at most mostLines lines, or their comment gives a
// reason.
func TestFunctionsAreShort(t *testing.T) {
	files, functions := 0, 0
	require.NoError(t, filepath.WalkDir(filepath.Join("..", ".."), func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); name == "testdata" || len(name) > 2 && name[0] == '.' {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, path, nil, parser.ParseComments)
		if err != nil || ast.IsGenerated(file) {
			return err
		}
		files++
		for _, decl := range file.Decls {
			f, ok := decl.(*ast.FuncDecl)
			if !ok || f.Body == nil {
				continue
			}
			functions++
			n := set.Position(f.End()).Line - set.Position(f.Pos()).Line + 1
			said := slices.ContainsFunc(reasons, func(r string) bool { return strings.Contains(f.Doc.Text(), r) })
			if n > mostLines && !said {
				t.Errorf("%s: %s has %d lines, want at most %d, or a comment with one of %q", set.Position(f.Pos()), f.Name.Name, n, mostLines, reasons)
			}
		}
		return nil
	}))
	require.Greater(t, files, 200)
	require.Greater(t, functions, 2000)
}
