package planning_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/plan"
)

// Megatron's formula is compared with the program's stored activations, for the sizes of the
// paper's 22B model (table 3: a micro-batch of 4).
func TestReferenceOfMegatron(t *testing.T) {
	args := strings.Fields("plan --effort 1 --model megatron-22b --batch 4 --seq 2048 --precision bf16 --ranks 8 --zero 3")
	r := command(args...)
	require.Zero(t, r.status, r.stderr)
	require.NotContains(t, r.stdout, "Megatron's formula")
	r = command(append(args, "--reference", "Megatron")...)
	require.Zero(t, r.status, r.stderr)
	for _, want := range []string{
		plan.Bytes(int64(cost.MegatronActivationBytes(48, 2048, 4, 6144, 64, false))),
		plan.Bytes(int64(cost.MegatronActivationBytes(48, 2048, 4, 6144, 64, true))),
		"section 4.1", "dropout masks", "70.3", "17.0",
	} {
		require.Contains(t, r.stdout, want)
	}
	_, doc := planned(t, args[1:]...)
	require.Contains(t, r.stdout, plan.Bytes(doc.Requested.Device.ClassPeakBytes["activations"]))
	r = command(append(args, "--reference", "zero")...)
	require.Equal(t, cli.ExitBadInput, r.status)
	require.Contains(t, r.stderr, "use one of none, megatron")
}

// The tables of the report fit a terminal of 80 columns.
func TestTheReportIsNarrow(t *testing.T) {
	for _, line := range []string{
		"--model gpt2-xl --ranks 4 --batch 8 --seq 1024 --gpu rtx-4090 --reference megatron",
		"--model llama-3.2-1b --nodes 128 --gpus-per-node 8 --batch 1 --precision bf16 --recompute full --gpu h100-80 --offload optimizer=host",
	} {
		narrow(t, command(append([]string{"plan", "--effort", "20"}, strings.Fields(line)...)...).stdout)
	}
}

// narrow checks that the tables of a report fit 80 columns.
func narrow(t *testing.T, report string) {
	t.Helper()
	for _, part := range []string{"Device memory", "Host memory", "A step, predicted", "Activations of a rank"} {
		_, table, ok := strings.Cut(report, "\n"+part)
		if !ok {
			require.Equal(t, "Activations of a rank", part, report)
			continue
		}
		table, _, _ = strings.Cut(table, "\n\n")
		require.Greater(t, strings.Count(table, "\n"), 3)
		for _, row := range strings.Split(table, "\n") {
			require.LessOrEqual(t, utf8.RuneCountInString(row), 80, row)
		}
	}
}
