package deps

import (
	"bytes"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// predicts are the packages whose floating-point results are written to a plan's document. That
// document has the same bytes on every CPU.
var predicts = []string{"comm/algo", "comm/algorithm", "graph", "internal/published", "memplan", "memplan/cost",
	"mesh", "model", "offload", "plan", "planner", "precision", "recompute", "search", "cmd/spillway/internal/planning"}

var (
	fused    = regexp.MustCompile(`\((\S+\.go:\d+)\)\tFN?M(?:ADD|SUB)[DS]\t`)
	approx   = regexp.MustCompile(`\bmath\.(Exp|Exp2|Expm1|Log|Log2|Log10|Log1p|Pow|Sin|Cos|Tan|Tanh|Cbrt|Hypot|Gamma|Erf)\(`)
	comments = regexp.MustCompile(`(?m)//.*$`)
)

// Predictions use no function whose last bits differ between CPUs, and no product that a compiler
// may fuse with a sum. On arm64 it does so, unless the product is converted to float64.
func TestPredictionsAreTheSameOnEveryCPU(t *testing.T) {
	args := []string{"build", "-gcflags=-S"}
	for _, name := range predicts {
		args = append(args, module+"/"+name)
		files, err := os.ReadDir("../../" + name)
		require.NoError(t, err)
		for _, f := range files {
			if !strings.HasSuffix(f.Name(), ".go") || strings.HasSuffix(f.Name(), "_test.go") {
				continue
			}
			text, err := os.ReadFile("../../" + name + "/" + f.Name())
			require.NoError(t, err)
			require.NotRegexp(t, approx, comments.ReplaceAllString(string(text), ""), "%s/%s", name, f.Name())
		}
	}
	cmd := exec.Command("go", args...)
	cmd.Env = append(os.Environ(), "GOARCH=arm64", "GOOS=linux", "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err)
	require.Contains(t, string(out), "FMULD", "no assembly is shown")
	for line := range bytes.Lines(out) { // 75 MB, too much for one regular expression
		if !bytes.Contains(line, []byte("ADD")) && !bytes.Contains(line, []byte("SUB")) {
			continue
		}
		if m := fused.FindSubmatch(line); m != nil {
			t.Errorf("%s: a product is fused with a sum; write float64(product)", m[1])
		}
	}
}
