package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/launching"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/training"
)

// trainLines returns the arguments of train in a cluster's script or manifest.
func trainLines(t *testing.T, file string) (list [][]string) {
	text, err := os.ReadFile(filepath.Join("../../examples/cluster", file))
	require.NoError(t, err)
	if filepath.Ext(file) != ".yaml" {
		joined := strings.ReplaceAll(string(text), "\\\n", " ")
		for _, m := range regexp.MustCompile(`spillway (train .*)`).FindAllStringSubmatch(joined, -1) {
			list = append(list, strings.Fields(m[1]))
		}
		return list
	}
	var manifest any
	require.NoError(t, yaml.Unmarshal(text, &manifest))
	var visit func(any)
	visit = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			for _, e := range v {
				visit(e)
			}
		case []any:
			var words []string
			for _, e := range v {
				visit(e)
				if s, ok := e.(string); ok {
					words = append(words, s)
				}
			}
			if at := slices.Index(words, "train"); at >= 0 {
				list = append(list, words)
			}
		}
	}
	visit(manifest)
	return list
}

// The commands that the cluster examples start parse: their flags exist.
func TestClusterExamplesStartWhatThereIs(t *testing.T) {
	for file, commands := range map[string]int{"slurm.sh": 1, "planned-slurm.sh": 1, "jobset.yaml": 1, "planned-jobset-gpu.yaml": 1, "mpijob.yaml": 1, "README.md": 4} {
		lines := trainLines(t, file)
		require.Len(t, lines, commands, file)
		for _, args := range lines {
			if args[0] == "launch" {
				require.NoError(t, launching.Command().ParseFlags(args[1:slices.Index(args, "--")]), file)
			}
			train := training.Command()
			require.NoError(t, train.ParseFlags(args[slices.Index(args, "train")+1:]), file)
			require.Empty(t, train.Flags().Args(), file)
			require.NotEmpty(t, train.Flag("checkpoint").Value.String(), file)
			require.True(t, train.Flag("resume").Changed, "%s: a retry goes on", file)
		}
	}
}

// The error for missing job variables depends on the requested device, and comes before any library
// is searched for.
func TestRanksThatCantMeet(t *testing.T) {
	for name, v := range map[string]string{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"} {
		t.Setenv(name, v)
	}
	for _, c := range []struct{ root, device, want string }{
		{"", "cpu", "CPU ranks have nothing to meet by"},
		{"", "cuda", "the first as a whole command: NCCL_COMM_ID=HOST:PORT torchrun --no-python --nproc-per-node 2 spillway "},
		{"h", "cuda", `NCCL_COMM_ID="h": want HOST:PORT`},
		{"h:1", "cpu", "CPU ranks have nothing to meet by"},
	} {
		t.Setenv("NCCL_COMM_ID", c.root)
		got := command("train", "--model", "gpt2", "--data", "d", "--device", c.device)
		require.Equal(t, cli.ExitBadInput, got.status)
		require.Contains(t, got.stderr, c.want)
	}
	// The config file can set it as well as the flag, which overrides it.
	file := writeFile(t, "c.yaml", "device: cuda\nmodel: gpt2\ndata: d\n")
	t.Setenv("NCCL_COMM_ID", "")
	require.Contains(t, command("train", "--config", file).stderr, "ranks on GPUs meet by NCCL_COMM_ID=HOST:PORT, a free port")
	require.Contains(t, command("train", "--config", file, "--device", "cpu").stderr, "CPU ranks have nothing to meet by")
	require.Contains(t, command("train", "--config", writeFile(t, "c.yaml", "devce: cuda\n")).stderr, "devce")
	require.Contains(t, command("train", "--config", file+"x").stderr, "no such file")
	file = writeFile(t, "c.yaml", "transport: shm\nmodel: gpt2\ndata: d\n")
	require.Contains(t, command("train", "--config", file).stderr, "--transport shm joins")
	for _, args := range [][]string{{"plan", "--model", "gpt2"}, {"bench", "comm"}} {
		got := command(append(args, "--transport", "nccl")...)
		require.Equal(t, cli.ExitBadInput, got.status)
		require.Contains(t, got.stderr, "--transport nccl")
		require.Contains(t, got.stderr, "CPU ranks")
	}
}
