package deps

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// aFlag matches a command-line flag, in a sentence or alone.
var aFlag = regexp.MustCompile(`(^|[^-\w])--[a-z%]`)

// withFlags are the folders of commands, and of packages that start them.
var withFlags = []string{"cmd", "benchmarks", "examples", "internal/testkit/gpucheck"}

// ofOthers are packages that call other programs and so contain those programs' flags.
var ofOthers = []string{"kernels/cuda/nvrtc", "internal/testkit/browser", "internal/testkit/shim"}

// Only commands know flags: the messages and documentation of library packages name fields instead.
func TestTheLibraryKnowsNoFlags(t *testing.T) {
	root := filepath.Join("..", "..")
	literals := 0
	require.NoError(t, filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		path, err := filepath.Rel(root, name)
		path = filepath.ToSlash(path)
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "testdata" || len(d.Name()) > 2 && d.Name()[0] == '.' || slices.Contains(withFlags, path)):
			return filepath.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || slices.Contains(ofOthers, filepath.ToSlash(filepath.Dir(path))):
			return nil
		}
		n, found := flagsIn(t, name)
		literals += n
		for _, at := range found {
			t.Errorf("%s: a package of the library names a flag", at)
		}
		return nil
	}))
	require.Greater(t, literals, 10000)
}

// flagsIn counts a file's string literals and finds flags in them and in comments of declarations.
func flagsIn(t *testing.T, name string) (literals int, found []token.Position) {
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, name, nil, parser.ParseComments)
	require.NoError(t, err)
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BasicLit:
			if n.Kind != token.STRING {
				break
			}
			literals++
			if aFlag.MatchString(strings.Trim(n.Value, "\"`")) {
				found = append(found, set.Position(n.Pos()))
			}
		case *ast.CommentGroup: // ast.Inspect visits comments of declarations and fields
			if aFlag.MatchString(n.Text()) {
				found = append(found, set.Position(n.Pos()))
			}
		}
		return true
	})
	return literals, found
}
