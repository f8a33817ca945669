package crash_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Every goroutine of the module defers crash.Guard first, in the function or closure of its go
// statement.
func TestEveryGoroutineIsGuarded(t *testing.T) {
	const root = "../.."
	files := token.NewFileSet()
	byFolder := map[string][]*ast.File{}
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			switch d.Name() {
			case "benchmarks", "examples", "testdata", "testkit", "build", ".git", "asmgen":
				return filepath.SkipDir
			}
			return nil
		}
		if strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") {
			f, err := parser.ParseFile(files, path, nil, 0)
			if err != nil {
				return err
			}
			byFolder[filepath.Dir(path)] = append(byFolder[filepath.Dir(path)], f)
		}
		return nil
	}))
	seen := 0
	for _, list := range byFolder {
		bodies := map[string][]*ast.BlockStmt{}
		for _, f := range list {
			for _, d := range f.Decls {
				if fn, ok := d.(*ast.FuncDecl); ok && fn.Body != nil {
					bodies[fn.Name.Name] = append(bodies[fn.Name.Name], fn.Body)
				}
			}
		}
		for _, f := range list {
			ast.Inspect(f, func(n ast.Node) bool {
				g, ok := n.(*ast.GoStmt)
				if !ok {
					return true
				}
				seen++
				ok = false
				switch fn := g.Call.Fun.(type) {
				case *ast.FuncLit:
					ok = guards(fn.Body)
				case *ast.Ident:
					ok = len(bodies[fn.Name]) > 0 && guardsOne(bodies[fn.Name])
				case *ast.SelectorExpr:
					ok = len(bodies[fn.Sel.Name]) > 0 && guardsOne(bodies[fn.Sel.Name])
				}
				if !ok {
					t.Errorf("%s: the goroutine does not defer crash.Guard first", files.Position(g.Pos()))
				}
				return true
			})
		}
	}
	require.Greater(t, seen, 5)
}

func guardsOne(bodies []*ast.BlockStmt) bool {
	for _, b := range bodies {
		if guards(b) {
			return true
		}
	}
	return false
}

func guards(b *ast.BlockStmt) bool {
	if len(b.List) == 0 {
		return false
	}
	d, ok := b.List[0].(*ast.DeferStmt)
	if !ok {
		return false
	}
	s, ok := d.Call.Fun.(*ast.SelectorExpr)
	return ok && s.Sel.Name == "Guard"
}
