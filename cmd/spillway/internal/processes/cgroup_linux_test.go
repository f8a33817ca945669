package processes

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// memoryGroup makes a control group with a memory limit in bytes, of version 1 or 2, and returns
// its folder; "": this process has no permission.
func memoryGroup(t *testing.T, bytes int64) string {
	for root, limit := range map[string]string{"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"} {
		folder, err := os.MkdirTemp(root, "spillway-test-")
		if err != nil {
			continue
		}
		if f, err := os.OpenFile(filepath.Join(folder, limit), os.O_WRONLY, 0); err == nil { // the kernel created the group's files
			_, err = f.WriteString(strconv.FormatInt(bytes, 10))
			require.NoError(t, f.Close())
			if err == nil {
				return folder
			}
		}
		require.NoError(t, os.Remove(folder))
	}
	return ""
}

// within runs a command line in a control group with a limit in bytes, rounded to pages. It skips
// the test if there can be no such group.
func within(t *testing.T, bytes int64, args ...string) (status int, said string) {
	t.Helper()
	binary, err := built()
	require.NoError(t, err)
	group := memoryGroup(t, (bytes+4095)/4096*4096)
	if group == "" {
		t.Skip("no control group of memory can be made here")
	}
	defer func() { require.NoError(t, os.Remove(group)) }()
	shell := []string{"-c", `echo $$ > "$0" && exec "$@"`, filepath.Join(group, "cgroup.procs"), binary}
	p := exec.Command("/bin/sh", append(shell, args...)...)
	out, err := p.CombinedOutput()
	if exit := new(exec.ExitError); err != nil {
		require.ErrorAs(t, err, &exit)
	}
	return p.ProcessState.ExitCode(), string(out)
}

// A run, of one process or launched, succeeds in a control group with its planned memory, and is
// refused in one with 0.95 times as much. It is killed in neither. SPILLWAY_LONG=1 draws 20 runs,
// SPILLWAY_LONG=all 100.
func TestRunsWithinTheMemoryOfTheirPlan(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	n := long.Or(2, 20)
	if long.All() {
		n = 100
	}
	for seed := range uint64(n) {
		r := rand.New(rand.NewPCG(seed, 35))
		pick := func(list ...string) string { return list[r.IntN(len(list))] }
		layers, width, ranks := pick("1", "2", "4", "8"), 64<<r.IntN(3), 1+r.IntN(4)
		model := filepath.Dir(writeFile(t, "config.json", pick(
			fmt.Sprintf(`{"model_type": "gpt2", "n_layer": %s, "n_head": 4, "n_embd": %d, "vocab_size": 256, "n_positions": 64}`, layers, width),
			fmt.Sprintf(`{"model_type": "llama", "num_hidden_layers": %s, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": %d, "intermediate_size": %d, "vocab_size": 256, "max_position_embeddings": 64}`, layers, width, 3*width))))
		args := []string{"--model", model, "--data", testdata + "/text.bin", "--steps", "3", "--checkpoint", "none", "--batch", pick("1", "2"), "--seq", pick("16", "32", "64"), "--zero", pick("0", "1", "2", "3"),
			"--precision", pick("fp32", "bf16", "fp16"), "--recompute", pick("none", "selective", "full"), "--accum", pick("1", "2", "4"), "--accum-order", pick("micro", "layer")}
		if where := pick("", "optimizer=host", "optimizer=disk", "optimizer=disk,parameters=disk,activations=disk", "activations=host", "parameters=host,gradients=host"); where != "" {
			args = append(args, "--offload", where, "--disk", t.TempDir())
		}
		processes := 1
		line := append([]string{"train", "--ranks", strconv.Itoa(ranks)}, args...)
		plan := append([]string{"plan", "--json", "-", "--ranks", strconv.Itoa(ranks)}, args...)
		if ranks > 1 && r.IntN(2) == 0 {
			processes, line = ranks, launched(ranks, append([]string{"train"}, args...)...)
			plan = append(plan, "--transport", "shm", "--ranks-per-process", "1")
		}
		got := command(plan...)
		require.Zero(t, got.status, got.stderr)
		var doc struct {
			Requested struct {
				ProcessBytes int64 `json:"process_bytes"`
			}
		}
		require.NoError(t, json.Unmarshal([]byte(got.stdout), &doc))
		all := doc.Requested.ProcessBytes * int64(processes)
		require.Positive(t, all)
		what := fmt.Sprintf("seed %d, %d bytes: %s", seed, all, strings.Join(line, " "))
		status, said := within(t, all, line...)
		require.Zero(t, status, "%s: %s", what, said)
		status, said = within(t, all*95/100, line...)
		require.Equal(t, 2, status, "%s: %s", what, said)
	}
}
