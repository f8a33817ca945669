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

// ofTests are packages outside internal/testkit that only tests import.
var ofTests = map[string]string{
	"owntest": "tests of a program's own operations use it",
}

// testsAlone have only tests and cannot be imported.
var testsAlone = []string{"internal/deps", "internal/readme"}

// Test helpers are in internal/testkit, except the listed packages.
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

// forPrograms are exported names that only tests use in this module, each with the reason to keep
// it.
var forPrograms = map[string]string{
	"MarshalJSON": "encoding/json calls it",
	"NewIn":       "tests put folders that fail, or record, under a run's checkpoints",
	"DoubleCUDA":  "tests of whole commands, in processes of their own",
}

// heldToUse are the packages whose exported names must be used or be listed in forPrograms.
var heldToUse = []string{".", "calibration", "checkpoint", "cluster", "config", "data", "data/token", "fsdp", "launch", "memplan", "memplan/cost", "model", "plan", "platform", "planner", "platform/gpu", "precision", "recompute", "run", "tensors", "train", "train/initial", "train/receipts", "zero"}

// Every exported name is used outside tests or listed in forPrograms.
func TestExportedNamesAreUsed(t *testing.T) {
	root := filepath.Join("..", "..")
	uses := map[string]int{} // number of uses of a name outside tests
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
	// Go's interfaces call these. The root package has its own list of names.
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

// exportedIn returns the names that a file exports at top level, and exported methods.
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
