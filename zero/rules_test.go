package zero

import (
	"go/ast"
	"go/parser"
	"go/token"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Only the file that defines an optimizer names it. No other file of this package, and no package
// that plans or runs, has an optimizer's name in a string, except the default of a Config.
func TestAnOptimizerIsAFile(t *testing.T) {
	names := OptimizerNames()
	require.Equal(t, []string{"adagrad", "adamw", "lamb", "larc", "lars", "muon", "novograd", "sgd"}, names)
	require.True(t, slices.IsSorted(names))
	require.Len(t, slices.Compact(names), len(rules), "two rules of one name")
	in := map[string][]string{} // optimizers named by a file
	for _, dir := range []string{".", "../plan", "../fsdp", "../offload", "../search", "../config", "../train", "../checkpoint", "../run", "../exec"} {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		require.NoError(t, err)
		require.NotEmpty(t, files, dir)
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			text, err := os.ReadFile(name)
			require.NoError(t, err)
			file, err := parser.ParseFile(token.NewFileSet(), name, text, 0)
			require.NoError(t, err)
			ast.Inspect(file, func(n ast.Node) bool {
				lit, ok := n.(*ast.BasicLit)
				if !ok || lit.Kind != token.STRING {
					return true
				}
				if v, err := strconv.Unquote(lit.Value); err == nil && slices.Contains(names, v) && !slices.Contains(in[name], v) {
					in[name] = append(in[name], v)
				}
				return true
			})
		}
	}
	require.Equal(t, []string{"adamw"}, in["../config/config.go"], "the default")
	delete(in, "../config/config.go")
	require.Equal(t, map[string][]string{"adagrad.go": {"adagrad"}, "adamw.go": {"adamw"}, "lamb.go": {"lamb"}, "lars.go": {"lars", "larc"}, "muon.go": {"muon"}, "novograd.go": {"novograd"}, "sgd.go": {"sgd"}}, in)
}

// Validate refuses constants outside their range. The tested values are the first beyond a limit,
// and NaN.
func TestConstantsOutOfRange(t *testing.T) {
	below0, nan := math.Nextafter(0, -1), math.NaN()
	for name, change := range map[string]func(*Optimizer){
		"beta1 1 ":             func(o *Optimizer) { o.Beta1 = 1 },
		"beta1 -5e-324":        func(o *Optimizer) { o.Beta1 = below0 },
		"beta2 1 ":             func(o *Optimizer) { o.Beta2 = 1 },
		"beta2 NaN":            func(o *Optimizer) { o.Beta2 = nan },
		"eps -5e-324":          func(o *Optimizer) { o.Eps = below0 },
		"eps NaN":              func(o *Optimizer) { o.Eps = nan },
		"weight decay -5e-3":   func(o *Optimizer) { o.Decay = below0 },
		"bf16 or in 8 bits":    func(o *Optimizer) { o.BF16, o.Int8 = true, true },
		`"adamx" is not known`: func(o *Optimizer) { o.Name = "adamx" },
	} {
		o := Optimizer{Name: "adamw", Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1}
		require.NoError(t, o.Validate())
		change(&o)
		require.ErrorContains(t, o.Validate(), name)
	}
}
