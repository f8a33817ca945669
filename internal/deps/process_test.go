package deps

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// ofTheProcess lists functions, by package, that change the process in which a library runs.
var ofTheProcess = map[string][]string{
	"runtime":       {"GOMAXPROCS"}, // except GOMAXPROCS(0), which only reads it
	"runtime/debug": {"FreeOSMemory", "SetGCPercent", "SetMemoryLimit", "SetMaxThreads"},
	"os/signal":     {"Notify", "NotifyContext", "Ignore", "Reset", "Stop"},
	"os":            {"Exit", "Chdir", "Setenv"},
}

// The root package and its dependencies do not change the process of the program that uses them.
// Only commands set processors, garbage collection and signals, or end the process.
func TestTheLibraryLeavesTheProcessAlone(t *testing.T) {
	all := load(t)
	checked := 0
	for path := range all {
		if path != "" && !slices.Contains(all[""].Deps, module+"/"+path) {
			continue
		}
		files, err := filepath.Glob(filepath.Join("..", "..", path, "*.go"))
		require.NoError(t, err)
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			set := token.NewFileSet()
			file, err := parser.ParseFile(set, name, nil, 0)
			require.NoError(t, err)
			checked++
			for _, call := range callsOf(file) {
				t.Errorf("%s calls %s", set.Position(call.pos), call.name)
			}
		}
	}
	require.Greater(t, checked, 200)
}

type call struct {
	name string
	pos  token.Pos
}

// callsOf returns a file's calls of functions in ofTheProcess.
func callsOf(file *ast.File) (list []call) {
	known := map[string]string{} // import path by name in the file
	for _, imp := range file.Imports {
		path := strings.Trim(imp.Path.Value, `"`)
		name := path[strings.LastIndexByte(path, '/')+1:]
		if imp.Name != nil {
			name = imp.Name.Name
		}
		known[name] = path
	}
	ast.Inspect(file, func(n ast.Node) bool {
		c, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		sel, ok := c.Fun.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		pkg, ok := sel.X.(*ast.Ident)
		if !ok || !slices.Contains(ofTheProcess[known[pkg.Name]], sel.Sel.Name) {
			return true
		}
		if len(c.Args) == 1 && sel.Sel.Name == "GOMAXPROCS" {
			if lit, ok := c.Args[0].(*ast.BasicLit); ok && lit.Value == "0" {
				return true
			}
		}
		list = append(list, call{pkg.Name + "." + sel.Sel.Name, c.Pos()})
		return true
	})
	return list
}

func TestCallsOfTheProcessAreFound(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "x.go", `package x
import ("runtime"; d "runtime/debug"; "os")
func f() int { d.FreeOSMemory(); os.Exit(1); runtime.GOMAXPROCS(3); return runtime.GOMAXPROCS(0) }`, 0)
	require.NoError(t, err)
	var names []string
	for _, c := range callsOf(file) {
		names = append(names, c.name)
	}
	require.Equal(t, []string{"d.FreeOSMemory", "os.Exit", "runtime.GOMAXPROCS"}, names)
}
