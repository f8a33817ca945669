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
	for _, pair := range [][2]string{{free, free}, {at("new"), at("./new")}, {at("also/x/y"), at("data/x/y")}, {text, at("hard")}} {
		err := Check([]Path{{"--metrics", pair[0]}, {"--trace", pair[1]}}, nil)
		require.ErrorContains(t, err, "--trace", pair)
		require.ErrorContains(t, err, "--metrics too", pair)
	}
	for _, pair := range [][2]string{{free, at("new")}, {at("a"), at("b")}, {"/dev/null", "/dev/null"}, {"-", "-"}, {"", ""}} {
		require.NoError(t, Check([]Path{{"--metrics", pair[0]}, {"--trace", pair[1]}}, nil), pair)
	}
}

// A model's folder is read in part: what else lies in it may be written.
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
