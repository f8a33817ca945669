package planning_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
)

// A checkpoint records the mesh as given, and a resumed run reports its changes.
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
	require.NotContains(t, said, "--tensor-slices", "it was not given")
	require.NotContains(t, said, "rows of a step")
	said = train("--steps", "4", "--resume")
	require.Contains(t, said, "rows of a step: 2 → 4, and so the results\n", "4 ranks cannot have 2 rows")
	said = train("--steps", "5", "--tensor", "2", "--resume")
	require.Contains(t, said, "rows of a step: 4 → 2, and so the results; --global-batch 4 keeps them")
	said = train("--steps", "6", "--pipeline", "2", "--global-batch", "4", "--resume")
	require.Contains(t, said, "--global-batch: 2 → 4")
	require.NotContains(t, said, "rows of a step")
}

// The settings that a mesh's refusal suggests are accepted.
func TestRefusedMeshes(t *testing.T) {
	for flags, want := range map[string]string{
		"--ranks 3 --tensor 2":                                    "--tensor 2 with --ranks 3: the number of ranks has to be a multiple of 2",
		"--ranks 3 --pipeline 2":                                  "--pipeline 2 with --ranks 3: the number of ranks has to be a multiple of 2",
		"--ranks 4 --pipeline 2 --tensor 4":                       "--tensor 4 and --pipeline 2 with --ranks 4: the number of ranks has to be a multiple of 8",
		"--ranks 2 --pipeline 2 --stages 0-0,0-1":                 "stage 1 is \"0-1\", and has to begin at layer 1",
		"--ranks 2 --pipeline 2 --stages 0-1":                     "has 1 range, and --pipeline is 2",
		"--ranks 4 --tensor-slices 2 --precision bf16":            "give --tensor 2, as many as slices, or fp32",
		"--ranks 4 --tensor 2 --tensor-slices 4 --precision fp16": "give --tensor 4, as many as slices, or fp32",
		"--ranks 3 --pipeline 3":                                  "--pipeline 3 with --ranks 3: 3 stages of 2 layers: each needs a layer of its own; give at most 2 stages, and ranks that they divide",
		"--ranks 4 --tensor 4 --shard-size 2":                     "--shard-size 2 with --tensor 4 and --ranks 4: states are sharded over 1 rank, and 2 does not divide 1; leave it out",
		"--ranks 8 --tensor 8":                                    "--tensor 8: h.0.attn.c_attn cannot be divided by 8: h.0.attn has 2 heads and 2 of keys and values; at most 2 is possible",
		"--ranks 2 --tensor 0":                                    "--tensor 0: at least 1 rank is needed",
		"--ranks 2 --pipeline 0":                                  "--pipeline 0: at least 1 stage is needed",
		"--ranks 2 --tensor -2":                                   "--tensor -2: at least 1 rank is needed",
		"--ranks 2 --shard-size 0":                                "--shard-size 0: at least 1 rank is needed",
		"--ranks 3 --tensor 3":                                    "--tensor 3: the parts of a layer are added in a binary tree; give a power of two",
	} {
		got := command(append(tinyWith(), strings.Fields(flags)...)...)
		require.Equal(t, 1, got.status, flags)
		require.Contains(t, got.stderr, want)
		require.NotContains(t, got.stderr, "plan:")
	}
	for flags, want := range map[string]string{
		"gpt2-xl --tensor 2": "h.0.attn has 25 heads and 25 of keys and values; no number is possible with this model; leave --tensor out",
		"olmo-2-7b --tensor 2 --tensor-slices 4": "--tensor-slices 4: model.layers.0.self_attn.q_proj cannot be divided by 4: its result goes through model.layers.0.self_attn.q_norm (rmsnorm), " +
			"whose rows of 4096 elements are of several heads; no number is possible with this model; leave --tensor and --tensor-slices out",
		"gemma-2-2b --tensor 2": "--tensor 2: a soft cap of logits cannot be divided; no number is possible with this model; leave --tensor out",
	} {
		got := command(append([]string{"plan", "--ranks", "2", "--model"}, strings.Fields(flags)...)...)
		require.Equal(t, 1, got.status, flags)
		require.Contains(t, got.stderr, want)
	}
	got := command(tinyWith("--pipeline-schedule", "gpipe")...)
	require.Zero(t, got.status)
	require.Contains(t, got.stderr, "--pipeline-schedule gpipe changes nothing")
	require.NotContains(t, command(tinyWith()...).stderr, "--pipeline-schedule")
}

// The command of an answer plans the answer, not the request, even if train does not run it.
func TestTheCommandOfAnAnswer(t *testing.T) {
	got := command("plan", "--ask", "gpus", "--model", "gpt2", "--gpu", "h100-80", "--tensor", "2", "--effort", "40")
	require.Zero(t, got.status, got.stderr)
	text := strings.Join(strings.Fields(got.stdout), " ")
	require.Contains(t, text, "planned only: --tensor with --device cuda: no GPU has run it yet spillway plan --effort 40 --gpu h100-80 "+
		`--model gpt2 --tensor 2 --ranks 2 \ --zero`)
}

// Settings that are planned only are named as they were given. Ways out keep the mesh and say so.
func TestPlansOfAMesh(t *testing.T) {
	for flags, want := range map[string]string{
		"--tensor-slices 2":       "planned only: --tensor-slices with --device cuda: no GPU has run it yet",
		"--pipeline 2":            "planned only: --pipeline with --device cuda: no GPU has run it yet",
		"--tensor 2 --pipeline 2": "planned only: --tensor and --pipeline with --device cuda: no GPU has run them yet",
	} {
		got := command(append([]string{"plan", "--model", "gpt2", "--ranks", "4", "--gpu", "h100-80", "--effort", "1"}, strings.Fields(flags)...)...)
		require.Zero(t, got.status, got.stderr)
		require.Contains(t, strings.Join(strings.Fields(got.stdout), " "), want)
	}
	got := command("plan", "--model", "gpt2", "--ranks", "2", "--tensor", "2", "--zero", "0", "--device-memory", "1GiB", "--effort", "40")
	require.Equal(t, cli.ExitDoesNotFit, got.status)
	require.Contains(t, got.stdout, "What would make it fit on the same --tensor and --pipeline, the cheapest first")
}

// A search reports if its effort ends before it has tried everything.
func TestEffortThatIsUsedUp(t *testing.T) {
	args := []string{"plan", "--model", "gpt2-xl", "--gpu", "rtx-3090", "--precision", "bf16", "--batch", "16", "--seq", "1024", "--effort", "1"}
	got := command(args...)
	require.Equal(t, cli.ExitDoesNotFit, got.status, got.stderr)
	text := strings.Join(strings.Fields(got.stdout), " ")
	require.Contains(t, text, "The effort was used up. A larger --effort looks further.")
	require.NotContains(t, text, "in vain")
	got = command("plan", "--model", "spillway-demo", "--ranks", "2", "--fit", "--effort", "1")
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stdout, "fits as requested; nothing else was planned")
	require.Empty(t, got.stderr)
}
