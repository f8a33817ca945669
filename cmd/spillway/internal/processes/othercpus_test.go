//go:build linux

package processes

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/kernels/cpu/level"
)

// arm64Variable names the program that runs arm64 binaries on this machine, qemu-aarch64-static.
const arm64Variable = "SPILLWAY_TEST_ARM64"

// otherMachines maps machines to commands of this program: each SIMD level of this CPU and, if
// arm64Variable is set, the program for arm64.
func otherMachines(t *testing.T) map[string][]string {
	t.Helper()
	binary, err := built()
	require.NoError(t, err)
	machines := map[string][]string{}
	for l := level.Portable; l <= level.Best(); l++ {
		machines[l.String()] = []string{"env", level.Env + "=" + l.String(), binary}
	}
	if qemu := os.Getenv(arm64Variable); qemu != "" {
		other := filepath.Join(t.TempDir(), "spillway")
		build := exec.CommandContext(t.Context(), "go", "build", "-tags", "static", "-o", other, "github.com/spillway-ml/spillway/cmd/spillway")
		build.Env = append(os.Environ(), "GOARCH=arm64", "CGO_ENABLED=0")
		said, err := build.CombinedOutput()
		require.NoError(t, err, string(said))
		machines["arm64"] = []string{qemu, other}
	}
	require.GreaterOrEqual(t, len(machines), 2)
	return machines
}

// A plan for GPUs has the same bytes on every CPU.
func TestSameBitsOnOtherCPUsOfPlans(t *testing.T) {
	t.Parallel()
	machines := otherMachines(t)
	for _, line := range []string{
		"--model gpt2 --gpu h100-80 --nodes 2 --gpus-per-node 8 --precision bf16 --tokens 1e9 --price 2",
		"--model " + testdata + "/gpt2 --gpu rtx-4090 --ranks 4 --zero 0 --batch 4 --device-memory 700MiB --reference megatron",
	} {
		first := ""
		for machine, command := range machines {
			args := append(command[1:len(command):len(command)], append(strings.Fields(line), "--json", "-", "--effort", long.Or("60", "1000"))...)
			args = slices.Insert(args, len(command)-1, "plan")
			got, err := exec.CommandContext(t.Context(), command[0], args...).Output()
			var refused *exec.ExitError
			require.True(t, err == nil || errors.As(err, &refused) && refused.ExitCode() == cli.ExitDoesNotFit, "%s: %v", machine, err)
			if first == "" {
				first = string(got)
			}
			require.Equal(t, first, string(got), "%s plans other bytes than one of %d machines", machine, len(machines))
		}
	}
}

// Three steps of a model of two layers have the same losses and parameters on all of them.
func TestSameBitsOnOtherCPUs(t *testing.T) {
	t.Parallel()
	machines := otherMachines(t)
	for name, flags := range map[string]string{
		"fp32": "", "bf16": "--precision bf16 --bf16-rounding portable", "fp16 with int8 moments": "--precision fp16 --int8 optimizer",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var first string
			for machine, command := range machines {
				metrics := filepath.Join(t.TempDir(), "m.jsonl")
				line := append(command[1:len(command):len(command)], tinyWith("--init", "random", "--steps", "3", "--ranks", "2", "--metrics", metrics)...)
				said, err := exec.CommandContext(t.Context(), command[0], append(line, strings.Fields(flags)...)...).CombinedOutput()
				require.NoError(t, err, "%s: %s", machine, said)
				got := outcomeOf(t, metrics)
				require.Len(t, got.losses, 3+1, "%s: steps and the end", machine)
				all := strings.Join(append(got.losses, got.sha), " ")
				if first == "" {
					first = all
				}
				require.Equal(t, first, all, "%s has other bits than one of %d machines", machine, len(machines))
			}
		})
	}
}
