package deps

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// importer holds the packages that the test checks, by path: config and planner.
type importer map[string]*types.Package

func (i importer) Import(path string) (*types.Package, error) {
	if p := i[path]; p != nil {
		return p, nil
	}
	return nil, errors.New("not looked at")
}

// typesOf returns the types of a package's expressions, as far as this package and known packages
// determine them. Other imports are missing, and the checker's errors about them are ignored. The
// package is added to known under its path.
func typesOf(set *token.FileSet, known importer, path string, files []*ast.File) *types.Info {
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}, Selections: map[*ast.SelectorExpr]*types.Selection{}, Uses: map[*ast.Ident]types.Object{}, Defs: map[*ast.Ident]types.Object{}}
	conf := types.Config{Importer: known, Error: func(error) {}}
	known[path], _ = conf.Check(path, set, files, info)
	return info
}

// named returns the name of a type, or of the type to which a pointer points.
func named(t types.Type) string {
	if p, ok := t.(*types.Pointer); ok {
		t = p.Elem()
	}
	if n, ok := t.(*types.Named); ok {
		return n.Obj().Name()
	}
	return ""
}

func pointer(t types.Type) bool {
	if t == nil {
		return false
	}
	_, ok := t.Underlying().(*types.Pointer)
	return ok
}

// writer finds the writes of a file to resolved values, and to Configs of others.
type writer struct {
	info  *types.Info
	found []string
	set   *token.FileSet
}

// target checks an expression that is written to or whose address is taken.
func (w *writer) target(e ast.Expr) {
	ofResolved, ofConfig := false, false // e is part of a value of that type
	for at := e; ; {
		switch x := at.(type) {
		case *ast.ParenExpr:
			at = x.X
			continue
		case *ast.IndexExpr:
			at = x.X
			continue
		case *ast.StarExpr:
			t := w.info.Types[x.X].Type
			switch named(t) {
			case "resolved", "Resolved":
				ofResolved = true
			case "Config", "request", "Request":
				ofConfig = true
			}
			if ofConfig && pointer(t) {
				w.tell(e, "writes a Config through a pointer")
				return
			}
			at = x.X
			continue
		case *ast.SelectorExpr:
			sel := w.info.Selections[x]
			if sel == nil { // of another package
				break
			}
			through := w.steps(sel)
			ofResolved = ofResolved || through["resolved"] || through["Resolved"]
			ofConfig = ofConfig || through["Config"] || through["request"] || through["Request"]
			if ofConfig && sel.Indirect() || ofConfig && pointer(w.info.Types[x.X].Type) {
				w.tell(e, "writes a Config through a pointer")
				return
			}
			at = x.X
			continue
		}
		break
	}
	if ofResolved {
		w.tell(e, "writes to what is resolved")
	}
}

// steps returns the names of the types through which a field selection goes, including embedded
// ones.
func (w *writer) steps(sel *types.Selection) map[string]bool {
	through := map[string]bool{}
	t := sel.Recv()
	for _, i := range sel.Index() {
		through[named(t)] = true
		if p, ok := t.Underlying().(*types.Pointer); ok {
			t = p.Elem()
		}
		s, ok := t.Underlying().(*types.Struct)
		if !ok {
			break
		}
		t = s.Field(i).Type()
	}
	return through
}

func (w *writer) tell(e ast.Expr, what string) {
	w.found = append(w.found, fmt.Sprintf("%s: %s", w.set.Position(e.Pos()), what))
}

func (w *writer) look(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.AssignStmt:
		for _, e := range n.Lhs {
			if _, ok := e.(*ast.Ident); !ok {
				w.target(e)
			}
		}
	case *ast.IncDecStmt:
		w.target(n.X)
	case *ast.RangeStmt:
		for _, e := range []ast.Expr{n.Key, n.Value} {
			if e != nil && n.Tok == token.ASSIGN {
				w.target(e)
			}
		}
	case *ast.CompositeLit:
		if name := named(w.info.Types[n].Type); name == "resolved" || name == "Resolved" {
			w.tell(n, "makes what is resolved")
		}
	case *ast.UnaryExpr:
		// The address of a Config may be passed to a method that reads it; the address of another
		// field may not.
		if n.Op == token.AND && !slices.Contains([]string{"Config", "request", "Request"}, named(w.info.Types[n.X].Type)) {
			if _, ok := n.X.(*ast.SelectorExpr); ok {
				w.target(n.X)
			}
		}
	}
	return true
}

// writes returns the positions of forbidden writes in a package, ignoring the file that resolves.
func writes(set *token.FileSet, known importer, path string, files []*ast.File, but string) []string {
	w := &writer{info: typesOf(set, known, path, files), set: set}
	for _, f := range files {
		if filepath.Base(set.Position(f.Pos()).Filename) != but {
			ast.Inspect(f, w.look)
		}
	}
	return w.found
}

// One file resolves a Config, once. Nothing writes to the result, and no library code writes to a
// Config that it does not own.
func TestWhatIsResolvedIsNotWritten(t *testing.T) {
	set := token.NewFileSet()
	sources := func(folder string) (files []*ast.File) {
		names, err := filepath.Glob(filepath.Join("..", "..", folder, "*.go"))
		require.NoError(t, err)
		for _, name := range names {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			f, err := parser.ParseFile(set, name, nil, 0)
			require.NoError(t, err)
			files = append(files, f)
		}
		return files
	}
	known := importer{}
	config, planner, train := sources("config"), sources("planner"), sources("train")
	require.Greater(t, len(config), 10)
	require.Greater(t, len(planner), 10)
	require.Greater(t, len(train), 20)
	require.Empty(t, writes(set, known, module+"/config", config, ""))
	require.Empty(t, writes(set, known, module+"/planner", planner, "resolve.go"))
	require.Empty(t, writes(set, known, module+"/train", train, "request.go"))
	require.NotEmpty(t, writes(set, known, module+"/planner", planner, ""), "resolve.go writes")
	for _, f := range config { // hooks are not fields of a Config
		ast.Inspect(f, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok || spec.Name.Name != "Config" {
				return true
			}
			var inner []string
			for _, field := range spec.Type.(*ast.StructType).Fields.List {
				for _, name := range field.Names {
					if !name.IsExported() {
						inner = append(inner, name.Name)
					}
				}
			}
			require.Equal(t, []string{"shared", "processes"}, inner, "what Sharing and Over keep")
			return false
		})
	}
}

func TestWritesAreFound(t *testing.T) {
	set := token.NewFileSet()
	parse := func(name, text string) *ast.File {
		f, err := parser.ParseFile(set, name, "package train\n"+text, 0)
		require.NoError(t, err)
		return f
	}
	base := parse("resolve.go", `
type Config struct { Zero int; Freeze []string; Outside [3]int }
type request struct { Config }
type resolved struct { request; model struct { Layers int } }
type planner struct { *resolved }
type Trainer struct { cfg *resolved; own request }
func resolve() *resolved { return &resolved{} }
func read(c *Config) int { return c.Zero }
`)
	for text, want := range map[string]int{
		"func f(t *Trainer) { t.cfg.Zero = 1 }":                        1,
		"func f(t *Trainer) { t.cfg.Zero++ }":                          1,
		"func f(t *Trainer) { t.cfg.Freeze[0] = `` }":                  1,
		"func f(t *Trainer) { t.cfg.Outside[1] = 2 }":                  1,
		"func f(t *Trainer) { t.own.Zero = 1 }":                        1,
		"func f(p planner) { p.Zero = 1 }":                             1,
		"func f(p planner) { p.model.Layers = 1 }":                     1,
		"func f(r resolved) *int { return &r.Zero }":                   1,
		"func f(r *resolved) { c := &r.Config; c.Zero = 1 }":           1,
		"func f(r *resolved) { *r = resolved{} }":                      2,
		"func (c *Config) f() { c.Zero = 1 }":                          1,
		"func (c *Config) f() { *c = Config{} }":                       1,
		"func f(t *Trainer) { for t.cfg.Zero = range 3 {} }":           1,
		"func f(c Config) Config { c.Zero = 1; return c }":             0,
		"func f(q request) request { q.Zero = 1; return q }":           0,
		"func f(r *resolved) { c := r.Config; c.Zero = 1 }":            0,
		"func f(r *resolved) int { return read(&r.Config) }":           0,
		"func f(t *Trainer) { t.cfg = resolve() }":                     0,
		"func f(t *Trainer) int { c := t.cfg; return c.Zero }":         0,
		"func f(q request) { var e int; e, q.Zero = 1, 2; _ = e }":     0,
		"func f(q request) *request { r := &q; r.Zero = 1; return r }": 1,
	} {
		found := writes(set, importer{}, "train", []*ast.File{base, parse("f.go", text)}, "resolve.go")
		require.Len(t, found, want, "%s: %q", text, found)
	}
}
