package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSharesOfThePeak checks that a trace reports each operation's share of the machine's peak
// FLOP/s, and a step's line the model's share.
func TestSharesOfThePeak(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Steps, c.PeakFlops, c.Trace, c.Metrics = 2, 2, 1e9, filepath.Join(t.TempDir(), "trace.json"), filepath.Join(t.TempDir(), "m.jsonl")
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	m, err := OpenMetrics(c.Metrics, -1)
	require.NoError(t, err)
	var last StepResult
	require.NoError(t, tr.Run(context.Background(), func(r StepResult) error { last = r; return m.Step(r) }))
	require.NoError(t, errors.Join(m.Close(), tr.Close()))
	var doc struct {
		TraceEvents []struct {
			Ph   string
			Dur  float64
			Args struct {
				Kind, Section, Pass string
				F                   float64 `json:"flops"`
				S                   float64 `json:"peak_share"`
			}
		}
	}
	text, err := os.ReadFile(c.Trace)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &doc))
	flops := 0.0
	for _, e := range doc.TraceEvents {
		if e.Ph != "X" || e.Args.F == 0 {
			continue
		}
		require.InEpsilon(t, e.Args.F/(e.Dur*1e-6)/1e9, e.Args.S, 1e-3)
		if product := strings.HasPrefix(e.Args.Kind, "linear") || strings.HasPrefix(e.Args.Kind, "attention") || strings.HasPrefix(e.Args.Kind, "head"); product && e.Args.Section == "step" && e.Args.Pass != "recompute" {
			flops += e.Args.F
		}
	}
	require.InEpsilon(t, flops/2/last.Seconds/1e9, last.FlopsShare, 1e-9, "of both ranks in the last of two steps")
	lines, err := os.ReadFile(c.Metrics)
	require.NoError(t, err)
	require.Contains(t, string(lines), fmt.Sprintf(`"model_flops_share":%v,"mfu":%[1]v`, last.FlopsShare))
}
