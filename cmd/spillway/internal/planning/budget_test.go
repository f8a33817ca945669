package planning_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/planning"
)

// --tokens and --price are the recommended plan's time, by GPU and in money.
func TestBudget(t *testing.T) {
	args := strings.Fields("plan --effort 20 --model gpt2 --gpu h100-80 --nodes 1 --gpus-per-node 8 --precision bf16 --seq 1024 --batch 8 --tokens 100e9 --price 2.5 --json -")
	r := command(args...)
	require.Zero(t, r.status, r.stderr)
	var doc planning.Doc
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &doc))
	step := doc.Recommended.Plan.StepSeconds * doc.Time.Low
	days := 100e9 / (8 * 8 * 1024) * step / 86400
	require.InEpsilon(t, days, doc.Budget.Days[0], 1e-9)
	require.InEpsilon(t, days*24*8, doc.Budget.RankHours[0], 1e-9)
	require.InEpsilon(t, days*24*8*2.5, doc.Budget.Cost[0], 1e-9)
	require.Greater(t, doc.Budget.Days[1], doc.Budget.Days[0])
	text := unwrapped(command(args[:len(args)-2]...).stdout)
	require.Regexp(t, `100 billion tokens take [\d.,]+–[\d.,]+ days and [\d,]+–[\d,]+ GPU-hours, which cost [\d,]+–[\d,]+ at --price 2.5`, text)
	require.Contains(t, command("plan", "--model", "gpt2", "--price", "2").stderr, "give --tokens too")
	require.Contains(t, command("plan", "--model", "gpt2", "--tokens", "-1").stderr, "--tokens -1")
}
