package spillway_test

import (
	"bufio"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// exports lists every exported name of the root package. Removing a name breaks programs; adding
// one enlarges the API.
var exports = strings.Fields(`
	Build CPUHardware Config Default DeviceHardware Diverged
	ErrConfig ErrDamaged ErrDiffers ErrDiverged ErrDoesNotFit ErrLost ErrNoDevice ErrStop
	EvalResult Explain Explanation FieldError Fit FitHere Fitted Fixed Forecast FrozenCache
	Hardware Job MachineTooSmall MetricsWriter MissingDevice Model
	New NewModel NoWay NothingFits OpenMetrics Own Passes Predict Refusal
	Sampling Settings StepResult Trainer Verification VerifyReceipt Way WaysOut Work`)

// kindsOfErrors need no example: examples of more specific errors show them.
var kindsOfErrors = []string{"ErrConfig", "ErrDiffers", "ErrDiverged", "ErrDoesNotFit", "ErrNoDevice"}

func parsed(t *testing.T, file string) *ast.File {
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
	require.NoError(t, err)
	return f
}

// TestExports checks that the exported names equal the list exports and that each name has an
// example.
func TestExports(t *testing.T) {
	var names []string
	for _, decl := range slices.Concat(parsed(t, "spillway.go").Decls, parsed(t, "face.go").Decls) {
		switch d := decl.(type) {
		case *ast.FuncDecl:
			names = append(names, d.Name.Name)
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch s := spec.(type) {
				case *ast.TypeSpec:
					names = append(names, s.Name.Name)
				case *ast.ValueSpec:
					for _, n := range s.Names {
						names = append(names, n.Name)
					}
				}
			}
		}
	}
	names = slices.DeleteFunc(names, func(n string) bool { return !ast.IsExported(n) })
	slices.Sort(names)
	require.Equal(t, exports, names)

	shown := map[string]bool{}
	for _, decl := range parsed(t, "example_test.go").Decls {
		if f, ok := decl.(*ast.FuncDecl); ok {
			if name, ok := strings.CutPrefix(f.Name.Name, "Example"); ok {
				shown[name] = true
			}
		}
	}
	for _, name := range names {
		if slices.Contains(kindsOfErrors, name) {
			continue
		}
		require.True(t, shown[name], "%s has no Example%[1]s", name)
	}
}

// TestDocumentationFitsTwoScreens checks that go doc prints 41 to 100 lines of at most 120 bytes.
func TestDocumentationFitsTwoScreens(t *testing.T) {
	out, err := exec.Command("go", "doc", ".").Output()
	require.NoError(t, err)
	lines := 0
	for s := bufio.NewScanner(strings.NewReader(string(out))); s.Scan(); lines++ {
		require.LessOrEqual(t, len(s.Text()), 120, "%s", s.Text())
	}
	require.Greater(t, lines, 40)
	require.LessOrEqual(t, lines, 100)
	text, err := os.ReadFile("spillway.go")
	require.NoError(t, err)
	require.LessOrEqual(t, strings.Count(string(text), "\n"), 1500)
}
