package processes

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/clitest"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
)

// A fresh run in a used folder would lose its own checkpoints or another's.
func TestAStartInAUsedFolderIsRefused(t *testing.T) {
	dir := saved(t)
	before := tree(t, dir)
	for _, args := range [][]string{
		tinyWith("--checkpoint", dir, "--keep", "1"),
		tinyWith("--checkpoint", dir, "--seed", "7", "--steps", "8"),
		{"train", "--checkpoint", dir, "--zero", "0"}, // the demo in a folder of the user
		{"train", "--checkpoint", dir},
	} {
		got := command(args...)
		require.Equal(t, cli.ExitBadInput, got.status, args)
		require.Contains(t, got.stderr, "--resume")
		require.Contains(t, got.stderr, dir)
		require.Equal(t, before, tree(t, dir))
	}
}

// A run that removes old checkpoints does not touch the user's files in the folder.
func TestFoldersOfTheUserStay(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ck")
	for _, name := range []string{"step-1", "step-2", ".writing-thesis", "step-00000002"} {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, name), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name, "mine"), []byte("mine"), 0o644))
	}
	got := command(tinyWith("--steps", "4", "--checkpoint", dir, "--save-every", "1", "--keep", "1")...)
	require.Equal(t, cli.ExitBadInput, got.status, "a canonical name is a damaged checkpoint")
	require.Contains(t, got.stderr, "step-00000002")
	mine := filepath.Join(dir, "step-00000002")
	require.NoError(t, os.Rename(mine, filepath.Join(dir, "step-2-notes")))
	got = command(tinyWith("--steps", "4", "--checkpoint", dir, "--save-every", "1", "--keep", "1")...)
	require.Zero(t, got.status, got.stderr)
	require.NoError(t, os.Rename(filepath.Join(dir, "step-2-notes"), mine))
	got = command(tinyWith("--steps", "6", "--checkpoint", dir, "--save-every", "1", "--keep", "1", "--resume")...)
	require.Zero(t, got.status, got.stderr)
	for _, name := range []string{"step-1", "step-2", ".writing-thesis", "step-00000002"} {
		text, err := os.ReadFile(filepath.Join(dir, name, "mine"))
		require.NoError(t, err)
		require.Equal(t, "mine", string(text))
	}
	step, _ := newest(t, dir)
	require.Equal(t, 6, step)
}

// inFolder runs the binary in a working folder.
func inFolder(t *testing.T, dir string, args ...string) result {
	t.Helper()
	if testing.Short() {
		t.Skip("starts processes")
	}
	path, err := built()
	require.NoError(t, err)
	var out, errs bytes.Buffer
	cmd := exec.Command(path, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &out, &errs
	err = cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		require.NoError(t, err)
	}
	return result{cmd.ProcessState.ExitCode(), out.String(), errs.String()}
}

// The demo replaces only its own checkpoints, once it has a complete new one.
func TestTheDemoReplacesOnlyItsOwn(t *testing.T) {
	t.Parallel()
	work := t.TempDir()
	demo := filepath.Join(work, "spillway-demo")
	short := []string{"train", "--data-glob", "doc.go", "--seq", "16", "--accum", "1", "--steps"}
	c := spillway.Default() // an earlier demo's run, with a tiny model because the demo's is slow
	c.Model, c.Data, c.Steps, c.Batch, c.Seq, c.Checkpoint, c.CheckpointMark = testdata+"/gpt2", testdata+"/text.bin", 3, 1, 16, demo, options.DemoMark
	tr, err := spillway.New(t.Context(), c)
	require.NoError(t, err)
	require.NoError(t, tr.Run(t.Context(), nil))
	require.NoError(t, tr.Close())
	before := tree(t, demo)

	got := inFolder(t, work, "train", "--zero", "0")
	require.Equal(t, cli.ExitDoesNotFit, got.status, got.stderr)
	require.Equal(t, before, tree(t, demo), "a refused demo changes nothing")

	got = inFolder(t, work, append(short, "1")...)
	require.Zero(t, got.status, got.stderr)
	step, _ := newest(t, demo)
	require.Equal(t, 1, step)
	require.NoDirExists(t, filepath.Join(demo, "step-00000003"))

	require.NoError(t, os.RemoveAll(demo))
	got = command(tinyWith("--checkpoint", demo)...) // the user's own run there
	require.Zero(t, got.status, got.stderr)
	before = tree(t, demo)
	got = inFolder(t, work, append(short, "2")...)
	require.Equal(t, cli.ExitBadInput, got.status)
	require.Contains(t, got.stderr, `does not bear the mark "demo"`)
	require.Equal(t, before, tree(t, demo))
}

// A second process in a folder is refused and does not affect the first; readers work at the same
// time.
func TestASecondProcessIsRefused(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ck")
	p := start(t, tinyWith("--checkpoint", dir, "--save-every", "1", "--keep", "2", "--steps", "1000000")...)
	step := 0
	waitFor(t, "checkpoint", func() bool {
		names, _ := filepath.Glob(filepath.Join(dir, "step-*"))
		return len(names) > 1
	})
	for range 3 {
		for _, args := range [][]string{{"--resume", "--steps", "1"}, {"--steps", "1"}, {"--resume", "--steps", "1000000"}} {
			got := command(tinyWith(append(args, "--checkpoint", dir)...)...)
			require.Equal(t, cli.ExitBadInput, got.status, got.stderr)
			require.Contains(t, got.stderr, "process "+strconv.Itoa(p.Process.Pid))
		}
		require.Zero(t, command("ckpt", "inspect", dir).status)
		got := command(tinyWith("--init", dir)...)
		require.Zero(t, got.status, got.stderr)
	}
	require.NoError(t, p.Process.Signal(syscall.SIGTERM))
	require.Equal(t, cli.ExitInterrupted, p.end(t), p.errs.String())
	step, _ = newest(t, dir)
	require.Greater(t, step, 1)
	got := command(tinyWith("--checkpoint", dir, "--resume", "--steps", strconv.Itoa(step))...)
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stdout, "nothing to do")
}

// Resume reports changes, and refuses other samples.
func TestResumeKnowsItsRun(t *testing.T) {
	dir := saved(t)
	resumed := func(args ...string) result {
		return command(tinyWith(append(args, "--checkpoint", dir, "--resume", "--steps", "3")...)...)
	}
	before := tree(t, dir)
	for flag, args := range map[string][]string{"seed": {"--seed", "9"}, "order": {"--order", "shuffled"}, "data": {"--data", writeFile(t, "o.txt", string(bytes.Repeat([]byte("other words "), 99)))}} {
		got := resumed(args...)
		require.Equal(t, cli.ExitBadInput, got.status, flag)
		require.Contains(t, got.stderr, "--"+flag)
		require.Contains(t, got.stderr, "--accept-changes")
		require.Equal(t, before, tree(t, dir))
	}
	got := command(tinyWith("--accept-changes")...)
	require.Equal(t, cli.ExitBadInput, got.status)
	got = resumed("--ranks", "2", "--batch", "3", "--lr", "0.5", "--seed", "9", "--accept-changes")
	require.Zero(t, got.status, got.stderr)
	for _, line := range []string{"--batch: 1 → 3", "--lr: 0.001 → 0.5", "--ranks: 1 → 2", "--seed: 1 → 9"} {
		require.Contains(t, got.stderr, "changed since step-00000002: "+line+"\n")
	}
	require.Contains(t, got.stderr, "resumed after step 2 from "+dir+", over 2 ranks in place of 1\n")
	require.NotContains(t, got.stderr, "--init")
	weights := []string{"--init", clitest.Testdata + "/gpt2", "--checkpoint", filepath.Join(dir, "new"), "--resume"}
	notRead := "the weights are those of the checkpoint; --init " + clitest.Testdata + "/gpt2 is not read\n"
	got = command(tinyWith(weights...)...)
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stderr, "no checkpoint in "+filepath.Join(dir, "new")+" yet: starting from step 1")
	require.NotContains(t, got.stderr, notRead)
	got = command(tinyWith(append(weights, "--steps", "3")...)...)
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stderr, notRead)
}

// A damaged newest checkpoint is skipped and named; the status is 2 only if none is complete.
func TestResumeTakesTheNewestWholeOne(t *testing.T) {
	dir := saved(t)
	last := filepath.Join(dir, "step-00000002")
	require.NoError(t, os.Truncate(filepath.Join(last, clitest.RankFile), 100))
	lines := writeFile(t, "m.jsonl", `{"step":1}`+"\n"+`{"step":2}`+"\n"+`{"step":3}`+"\n") // of which this run ends at the second
	got := command(tinyWith("--checkpoint", dir, "--resume", "--metrics", lines)...)
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stderr, "warning: step-00000002 is passed over: "+filepath.Join(last, clitest.RankFile)+" has 100 bytes")
	require.Contains(t, got.stderr, "resumed after step 1 from "+dir+": 1 step is run again\n")
	require.DirExists(t, last+".2")
	for _, name := range []string{"step-00000001", "step-00000002.2"} {
		require.NoError(t, os.Remove(filepath.Join(dir, name, "manifest.json")))
	}
	got = command(tinyWith("--checkpoint", dir, "--resume")...)
	require.Equal(t, cli.ExitDoesNotFit, got.status)
	for _, name := range []string{"step-00000001", "step-00000002:", "step-00000002.2"} {
		require.Contains(t, got.stderr, name)
	}
}

// An output is never an input or another output.
func TestOutputsAreNoInputs(t *testing.T) {
	text := string(bytes.Repeat([]byte("some text "), 999))
	data := writeFile(t, "own.txt", text)
	model := edited(t, "gpt2", func(map[string]any) {})
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(data, link))
	hard := filepath.Join(filepath.Dir(data), "hard")
	require.NoError(t, os.Link(data, hard))
	config := writeFile(t, "c.yaml", "steps: 1\n")
	ck := saved(t)
	base := []string{"train", "--model", model, "--data", data, "--steps", "1", "--seq", "16", "--batch", "1"}
	for _, args := range [][]string{
		{"--metrics", data}, {"--metrics", link}, {"--trace", hard}, {"--trace", filepath.Join(model, "config.json")},
		{"--config", config, "--metrics", config}, {"--metrics", "m.jsonl", "--trace", "./m.jsonl"},
		{"--checkpoint", ck, "--resume", "--metrics", filepath.Join(ck, "step-00000001", "manifest.json")},
		{"--checkpoint", ck, "--resume", "--metrics", filepath.Join(ck, ".spillway-marks")},
	} {
		got := command(append(base, args...)...)
		require.Equal(t, cli.ExitBadInput, got.status, args)
		require.Regexp(t, `^spillway: --(metrics|trace|checkpoint) `, got.stderr, args)
		now, err := os.ReadFile(data)
		require.NoError(t, err)
		require.Equal(t, text, string(now))
	}
	got := command("plan", "--model", model, "--json", filepath.Join(model, "config.json"))
	require.Equal(t, cli.ExitBadInput, got.status)
	got = command("ckpt", "verify", ck)
	require.Zero(t, got.status, got.stdout)
	require.Zero(t, command(append(base, "--metrics", "/dev/null", "--trace", "/dev/null")...).status)
}
