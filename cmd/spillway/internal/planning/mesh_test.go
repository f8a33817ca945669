package planning_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
)

// A checkpoint records the mesh as it was given, and a run that goes on tells what of it changed.
func TestResumeTellsTheMesh(t *testing.T) {
	dir := t.TempDir()
	train := func(args ...string) string {
		t.Helper()
		got := command(append([]string{"train", "--model", testdata + "/llama-untied", "--data", testdata + "/text.bin", "--batch", "1", "--seq", "16",
			"--ranks", "4", "--checkpoint", dir}, args...)...)
		require.Zero(t, got.status, got.stderr)
		return got.stdout + got.stderr
	}
	train("--steps", "1", "--tensor", "2")
	got := command("ckpt", "inspect", dir)
	require.Contains(t, got.stdout, `--ranks "4"`)
	require.Contains(t, got.stdout, `--tensor "2"`)
	said := train("--steps", "2", "--tensor", "2", "--resume")
	require.NotContains(t, said, "in place of")
	require.NotContains(t, said, "changed since")
	said = train("--steps", "3", "--pipeline", "2", "--resume")
	require.NotContains(t, said, "in place of")
	require.Contains(t, said, "--tensor: 2 → not in use")
	require.Contains(t, said, "--pipeline: not in use → 2")
}

// What a refusal of a mesh says to do is not refused in turn.
func TestRefusedMeshes(t *testing.T) {
	for flags, want := range map[string]string{
		"--ranks 3 --tensor 2":                                    "--tensor 2 with --ranks 3: the number of ranks has to be a multiple of 2",
		"--ranks 3 --pipeline 2":                                  "--pipeline 2 with --ranks 3: the number of ranks has to be a multiple of 2",
		"--ranks 4 --pipeline 2 --tensor 4":                       "--tensor 4 and --pipeline 2 with --ranks 4: the number of ranks has to be a multiple of 8",
		"--ranks 2 --pipeline 2 --stages 0-0,0-1":                 "stage 1 is \"0-1\", and has to begin at layer 1",
		"--ranks 2 --pipeline 2 --stages 0-1":                     "has 1 range, and --pipeline is 2",
		"--ranks 4 --tensor-slices 2 --precision bf16":            "give --tensor 2, as many as slices, or fp32",
		"--ranks 4 --tensor 2 --tensor-slices 4 --precision fp16": "give --tensor 4, as many as slices, or fp32",
	} {
		got := command(append(tinyWith(), strings.Fields(flags)...)...)
		require.Equal(t, 1, got.status, flags)
		require.Contains(t, got.stderr, want)
	}
	got := command(tinyWith("--pipeline-schedule", "gpipe")...)
	require.Zero(t, got.status)
	require.Contains(t, got.stderr, "--pipeline-schedule gpipe changes nothing")
	require.NotContains(t, command(tinyWith()...).stderr, "--pipeline-schedule")
}

// The command of an answer is what was answered, not the question, also where train does not run it.
func TestTheCommandOfAnAnswer(t *testing.T) {
	got := command("plan", "--ask", "gpus", "--model", "gpt2", "--gpu", "h100-80", "--tensor", "2", "--effort", "40")
	require.Zero(t, got.status, got.stderr)
	text := strings.Join(strings.Fields(got.stdout), " ")
	require.Contains(t, text, "planned only: --tensor with --device cuda: no GPU has run it yet spillway plan --effort 40 --gpu h100-80 "+
		`--model gpt2 --tensor 2 --ranks 2 \ --zero`)
}

// A search says so where its effort ends before it has looked at everything.
func TestEffortThatIsUsedUp(t *testing.T) {
	args := []string{"plan", "--model", "gpt2-xl", "--gpu", "rtx-3090", "--precision", "bf16", "--batch", "16", "--seq", "1024", "--effort", "1"}
	got := command(args...)
	require.Equal(t, cli.ExitDoesNotFit, got.status, got.stderr)
	text := strings.Join(strings.Fields(got.stdout), " ")
	require.Contains(t, text, "The effort was used up. A larger --effort looks further.")
	require.NotContains(t, text, "in vain")
}
