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

// ofTests are the packages outside internal/testkit that only tests import.
var ofTests = map[string]string{
	"owntest": "tests of a program's own operations use it",
}

// testsAlone have tests and nothing to import.
var testsAlone = []string{"internal/deps", "internal/readme"}

// Test helpers are in internal/testkit, except those listed.
func TestHelpersOfTestsAreListed(t *testing.T) {
	all := load(t)
	used := map[string]bool{}
	for path, p := range all {
		if path == "" || path == "tensors" || below(path, "cmd") || below(path, "examples") || below(path, "benchmarks") {
			used[path] = true
			for _, dep := range p.Deps {
				used[strings.TrimPrefix(dep, module+"/")] = true
			}
		}
	}
	for path := range all {
		if !used[path] && !below(path, "internal/testkit") && !slices.Contains(testsAlone, path) {
			require.Contains(t, ofTests, path, "only tests import it: move it to internal/testkit/")
		}
	}
	for path := range ofTests {
		require.Contains(t, all, path)
	}
}

// forPrograms are exported names that nothing in the module but tests uses, and why they
// stay.
var forPrograms = map[string]string{
	"MarshalJSON": "encoding/json calls it",
	"NewIn":       "tests put folders that fail, or record, under a run's checkpoints",
	"DoubleCUDA":  "tests of whole commands, in processes of their own",
}

// heldToUse are the packages whose exported names are held to forPrograms.
var heldToUse = []string{".", "calibration", "checkpoint", "cluster", "config", "data", "data/token", "fsdp", "launch", "memplan", "memplan/cost", "model", "plan", "platform", "planner", "platform/gpu", "precision", "recompute", "run", "tensors", "train", "train/initial", "train/receipts", "zero"}

// What is exported is used by something that is no test, or listed.
func TestExportedNamesAreUsed(t *testing.T) {
	root := filepath.Join("..", "..")
	uses := map[string]int{} // of a name in files that are no tests
	declared := map[string]string{}
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := d.Name(); d.IsDir() && (name == "testdata" || len(name) > 2 && name[0] == '.') {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if id, ok := n.(*ast.Ident); ok && id.IsExported() {
				uses[id.Name]++
			}
			return true
		})
		dir, err := filepath.Rel(root, filepath.Dir(path))
		if slices.Contains(heldToUse, filepath.ToSlash(dir)) {
			for _, name := range exportedIn(file) {
				declared[name] = dir
			}
		}
		return err
	}))
	require.Greater(t, len(declared), 300)
	// Go's own interfaces call these, and the face is held to its own list.
	methods := []string{"Error", "Unwrap", "Is", "String", "Less", "Swap", "Len", "Read", "Write", "GobEncode", "GobDecode"}
	for name, dir := range declared {
		if uses[name] == 1 && dir != "." && !slices.Contains(methods, name) {
			require.Contains(t, forPrograms, name, "%s: only tests use it: take it away, or list it", dir)
		}
	}
	for name := range forPrograms {
		require.Contains(t, declared, name)
	}
}

// exportedIn are the names that a file exports at its top level, methods too.
func exportedIn(file *ast.File) (names []string) {
	add := func(id *ast.Ident) {
		if id.IsExported() {
			names = append(names, id.Name)
		}
	}
	for _, decl := range file.Decls {
		switch d := decl.(type) {
		case *ast.FuncDecl:
			add(d.Name)
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch s := spec.(type) {
				case *ast.TypeSpec:
					add(s.Name)
				case *ast.ValueSpec:
					for _, id := range s.Names {
						add(id)
					}
				}
			}
		}
	}
	return names
}
