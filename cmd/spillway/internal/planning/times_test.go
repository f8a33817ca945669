package planning_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/planning"
)

// --stack predicts from one stack's published runs; text, JSON and a plan read back say so.
func TestPlanOfAStack(t *testing.T) {
	args := strings.Fields("plan --model gpt2 --gpu h100-80 --nodes 1 --gpus-per-node 8 --precision bf16 --seq 1024 --batch 8 --effort 5 --json -")
	of := func(stack ...string) (doc planning.Doc) {
		r := command(append(append([]string{}, args...), stack...)...)
		require.Zero(t, r.status, r.stderr)
		require.NoError(t, json.Unmarshal([]byte(r.stdout), &doc))
		return doc
	}
	all, own, torch := of(), of("--stack", "spillway"), of("--stack", "torch")
	require.Equal(t, all.Time, own.Time)
	require.Empty(t, all.Time.Stack)
	require.Zero(t, all.Time.Scale)
	require.Equal(t, "torch", torch.Time.Stack)
	require.True(t, torch.Time.Low < torch.Time.Scale && torch.Time.Scale < torch.Time.High, "%+v", torch.Time)
	require.Less(t, torch.Time.High/torch.Time.Low, all.Time.High/all.Time.Low, "one stack's interval is narrower")
	require.InEpsilon(t, all.TokensPerSecond.Predicted/torch.Time.Scale, torch.TokensPerSecond.Predicted, 1e-9)
	require.True(t, torch.TokensPerSecond.Low < torch.TokensPerSecond.Predicted && torch.TokensPerSecond.Predicted < torch.TokensPerSecond.High)
	require.Contains(t, torch.Time.Text, "published runs of torch (on h100-80)")
	require.Contains(t, of("--stack", "internevo").Time.Text, "(on a100-80; too few are known of this generation)")

	require.Contains(t, command("plan", "--model", "gpt2", "--stack", "torch").stderr, "--stack torch is for predicted times on GPUs; give --gpu NAME too")
	require.Contains(t, command("plan", "--model", "gpt2", "--gpu", "h100", "--stack", "jax").stderr, `--stack "jax": no published run of it is known; give torch,`)
}
