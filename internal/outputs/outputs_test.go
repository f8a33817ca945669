package outputs

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCheck(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	write := func(name string) string {
		require.NoError(t, os.MkdirAll(filepath.Dir(at(name)), 0o755))
		require.NoError(t, os.WriteFile(at(name), []byte(name), 0o644))
		return at(name)
	}
	text, config := write("text.txt"), write("model/config.json")
	deep := write("data/a/b.txt")
	require.NoError(t, os.Link(text, at("hard")))
	require.NoError(t, os.Symlink(text, at("soft")))
	require.NoError(t, os.Symlink(at("data"), at("also")))
	require.NoError(t, os.Symlink(at("nowhere"), at("dead")))
	free := write("free")
	inputs := []Path{{"--data", text}, {"--model", at("model")}, {"--eval-data", at("data")}, {"--init", "random"}, {"--tokenizer", ""}}
	for out, words := range map[string]string{
		text: "--data", at("hard"): "--data", at("soft"): "--data", at("./data/../text.txt"): "--data",
		config: "--model", deep: "--eval-data", at("also/a/b.txt"): "--eval-data",
	} {
		err := Check([]Path{{"--trace", ""}, {"--metrics", out}}, inputs)
		require.ErrorContains(t, err, "--metrics", out)
		require.ErrorContains(t, err, words+" reads", out)
	}
	for _, out := range []string{free, at("new"), at("no/such/folder"), "/dev/null", "-", "", at("dead")} {
		require.NoError(t, Check([]Path{{"--metrics", out}}, inputs), out)
	}
	for _, out := range []string{at("data/new"), at("also/a/new"), at("data/no/such")} { // the next run would read it
		require.ErrorContains(t, Check([]Path{{"--metrics", out}}, inputs), "which --eval-data reads", out)
	}
	require.NoError(t, os.Symlink("new", at("link")))
	require.NoError(t, os.Symlink(at("also/../link"), at("link2")))
	require.NoError(t, os.Symlink("loop", at("loop")))
	require.NoError(t, os.Symlink(at("data/dead"), at("into")))
	require.ErrorContains(t, Check([]Path{{"--metrics", at("into")}}, inputs), "which --eval-data reads")
	for _, pair := range [][2]string{{free, free}, {at("new"), at("./new")}, {at("also/x/y"), at("data/x/y")}, {text, at("hard")},
		{at("link"), at("new")}, {at("link"), at("link2")}, {at("link2/x"), at("new/x")}, {at("loop"), at("loop")}} {
		err := Check([]Path{{"--metrics", pair[0]}, {"--trace", pair[1]}}, nil)
		require.ErrorContains(t, err, "--trace", pair)
		require.ErrorContains(t, err, "--metrics too", pair)
	}
	for _, pair := range [][2]string{{free, at("new")}, {at("a"), at("b")}, {"/dev/null", "/dev/null"}, {"-", "-"}, {"", ""}} {
		require.NoError(t, Check([]Path{{"--metrics", pair[0]}, {"--trace", pair[1]}}, nil), pair)
	}
}

// Paths inside a checkpoint, existing or not, and names used by checkpoints are refused as outputs.
// Other files beside checkpoints are accepted.
func TestCheckStored(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"ck/step-00000002/manifest.json", "ck/step-00000002/rank-00000-of-00001.safetensors", "ck/.spillway-marks", "renamed/rank-00000-of-00001.safetensors", "m/config.json"} {
		require.NoError(t, os.MkdirAll(filepath.Dir(at(name)), 0o755))
		require.NoError(t, os.WriteFile(at(name), []byte(name), 0o644))
	}
	require.NoError(t, os.Symlink(at("ck"), at("link")))
	require.NoError(t, os.Symlink("ck/step-00000004", at("dead")))
	require.NoError(t, os.Symlink("ck/step-00000002/manifest.json", at("soft")))
	require.NoError(t, os.Link(at("ck/step-00000002/rank-00000-of-00001.safetensors"), at("hard")))
	for _, folder := range []string{"ck", "link", "ck/step-00000002", "link/step-00000002"} {
		for _, out := range []string{"ck/step-00000002/manifest.json", "ck/step-00000002/new", "link/step-00000002/a/b", "ck/step-00000002", "ck/step-00000004",
			"ck/step-00000004.2", "ck/step-00000006/manifest.json", "ck/.spillway-marks", "ck/.spillway-lock", "dead", "dead/x", "soft",
			"ck/.writing-step-00000002-0123456789abcdef0123456789abcdef"} {
			err := CheckStored([]Path{{"--trace", ""}, {"--metrics", at(out)}}, []Path{{"--model", ""}, {"--init", at(folder)}})
			require.ErrorContains(t, err, "--metrics", "%s %s", folder, out)
			require.ErrorContains(t, err, "would lie among the checkpoints of --init", "%s %s", folder, out)
		}
		for _, out := range []string{"ck/metrics.jsonl", "ck/runs/step-00000002/m", "ck/step-2", "m/step-00000002/x", "step-00000002/x", "ck"} {
			require.NoError(t, CheckStored([]Path{{"--metrics", at(out)}}, []Path{{"--init", at(folder)}}), "%s %s", folder, out)
		}
		require.ErrorContains(t, CheckStored([]Path{{"--metrics", at("hard")}}, []Path{{"--init", at(folder)}}), "which --init reads", folder)
	}
	require.Error(t, CheckStored([]Path{{"--metrics", at("renamed/x")}}, []Path{{"--init", at("renamed")}}))
	require.NoError(t, CheckStored([]Path{{"--metrics", at("step-00000002/x")}}, []Path{{"--init", at("renamed")}}))
	require.NoError(t, CheckStored([]Path{{"--metrics", at("m/x")}}, []Path{{"--init", at("m")}}))
	require.Error(t, CheckStored([]Path{{"--metrics", at("new/step-00000002")}}, []Path{{"--checkpoint", at("new")}}), "a folder to be made")
	require.Equal(t, []Path{{"--model", at("m")}}, Folders(Path{"--model", at("m")}, Path{"--init", "random"}, Path{"--init", at("soft")}, Path{"--init", ""}))
}

// Training reads only some files of a model's folder; the others may be written.
func TestModelFiles(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"config.json", "model-00001.safetensors", "log.txt"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o644))
	}
	require.Equal(t, []Path{{"--model", filepath.Join(dir, "config.json")}, {"--model", filepath.Join(dir, "model-00001.safetensors")}}, ModelFiles("--model", dir))
	require.Equal(t, []Path{{"--init", filepath.Join(dir, "log.txt")}}, ModelFiles("--init", filepath.Join(dir, "log.txt")))
	require.Empty(t, ModelFiles("--init", ""))
	require.NoError(t, Check([]Path{{"--metrics", filepath.Join(dir, "log.txt")}}, ModelFiles("--model", dir)))
	require.Error(t, Check([]Path{{"--metrics", filepath.Join(dir, "config.json")}}, ModelFiles("--model", dir)))
}
