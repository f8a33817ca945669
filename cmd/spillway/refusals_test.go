package main

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// Impossible values are rejected in one line that suggests a correction.
func TestOneLineRefusals(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"--disk d:0", `--disk: "d:0": a size of 0 leaves no memory at all`},
		{"--disk d:1ZB", `--disk: "d:1ZB": "1ZB" is not a size; write bytes, or a number with KB`},
		{"--disk d:5G", `--disk: "d:5G": "5G" is not a size; write 5GB`},
		{"--disk d:0KiB", `--disk: "d:0KiB": a size of 0 leaves no memory at all`},
		{"--frozen-cache host", `--frozen-cache: "host": a size is needed after the tier, as in host:4GiB`},
		{"--frozen-cache host:-1", `--frozen-cache: "host:-1": "-1" is not a size;`},
		{"--frozen-cache disk:1XB", `--frozen-cache: "disk:1XB": "1XB" is not a size;`},
		{"--frozen-cache disk:0", `--frozen-cache: "disk:0": a size of more than 0 is needed`},
		{"--freeze h.{0-1}.mpl.*", `spillway: --freeze: no parameter matches "h.{0-1}.mpl.*"; the nearest are h.*.mlp.*, `},
		{"--freeze h.{1", `spillway: --freeze: "h.{1": write a range of numbers`},
		{"--recompute drop:h.0.mlp.actt", `spillway: --recompute: no activation that can be computed again matches "h.0.mlp.actt"; the nearest are h.0.mlp.act, `},
		{"--offload activations=host:h.0.mlp.actt", `spillway: --offload: no activation matches "h.0.mlp.actt"; the nearest are h.0.mlp.act, `},
		{"--offload optimizer=host,optimizer=disk", "optimizer is given twice"},
		{"--offload optimizer=host:25%+host", "host is given twice"},
		{"--batch 2 --ranks 5 --global-batch 24", "--global-batch 24 is 12 micro-batches of --batch 2, which 5 ranks do not divide; 4 or 6 ranks do; --reproducible gives each rank a share and pads the last micro-batch\n  spillway train "},
		{"--batch 5 --ranks 2 --global-batch 24", "--global-batch 24 is no multiple of --batch 5 rows; micro-batches of 4 or 6 rows are possible; --reproducible gives each rank a share and pads the last micro-batch\n  spillway train "},
		{"--batch 5 --ranks 6 --global-batch 24", "--global-batch 24 is no multiple of --batch 5 rows; micro-batches of 4 rows are possible\n"},
		{"--batch 4 --ranks 3 --global-batch 10 --shard-size 1", "--global-batch 10 is neither a multiple of --batch 4 rows nor of 3 ranks; 2 or 5 ranks divide it\n"},
		{"--ranks 4 --rank-shares 1,2,1 --reproducible", "--rank-shares [1 2 1]: 3 shares for 4 ranks; give one for each\n"},
		{"--ranks 2 --rank-shares 1,2", "--rank-shares needs --reproducible"},
		{"--ranks 2 --rank-shares 1,0", "\"1,0\" is not a list of numbers of at least 1"},
		{"--ranks 2 --rank-shares 1,3 --global-batch 5 --reproducible", "--rank-shares [1 3] are 4 micro-batches, and --global-batch 5 of --batch 1 is 5\n"},
		{"--ranks 2 --rank-shares 1,3 --accum 2 --reproducible", "--rank-shares [1 3] with --accum 2: the largest share is 3 micro-batches"},
		{"--batch-schedule 0:8,4", `--batch-schedule: "0:8,4" is no list of STEP:ROWS; write it as in 0:32,500:64,2000:128`},
		{"--batch-schedule 1:8", `--batch-schedule: "1:8": the first entry is of step 1; it must be of step 0, as in 0:8`},
		{"--batch-schedule 0:8,2:6,2:4", `--batch-schedule: "0:8,2:6,2:4": step 2 follows step 2; steps must increase`},
		{"--batch-schedule 0:4,2:8 --global-batch 4", "--batch-schedule 0:4,2:8 with --global-batch 4: the schedule says the rows of each step; leave --global-batch out\n"},
		{"--batch-schedule 0:4,2:8 --accum 4", "--batch-schedule 0:4,2:8 with --accum 4: a step's micro-batches follow from its rows; leave --accum out\n"},
		{"--batch-schedule 0:4,2:8 --accum-order layer", "--batch-schedule 0:4,2:8 with --accum-order layer: layer order needs the same number of micro-batches in every step; leave --accum-order out\n"},
		{"--ranks 2 --batch-schedule 0:4,2:8 --reproducible --rank-shares 1,3", "--batch-schedule 0:4,2:8 with --rank-shares [1 3]: the shares are of steps of one size, and the schedule has several; leave one of them out\n"},
		{"--batch 2 --ranks 2 --batch-schedule 0:8,400:10", "--batch-schedule 0:8,400:10: a step of 10 rows is 5 micro-batches of --batch 2, which 2 ranks do not divide; 1 or 5 ranks do; --reproducible gives each rank a share and pads the last micro-batch\n  spillway train "},
		{"--ranks 4 --batch-schedule 0:3,9:12 --reproducible", "--batch-schedule 0:3,9:12: a step of 3 rows is 3 micro-batches of --batch 1, and each of 4 ranks needs one; at most 3 ranks have one\n"},
		{"--ranks 4 --global-batch 3 --reproducible", "--global-batch 3 is 3 micro-batches of --batch 1, and each of 4 ranks needs one; at most 3 ranks have one\n"},
		{"--batch 2 --ranks 2 --global-batch 24 --accum 3", "--global-batch 24 with --accum 3: 2 ranks of --batch 2 take 6 micro-batches each; leave one of them out\n"},
		{"--ranks 4 --shard-size 2 --reproducible", "--reproducible with --shard-size 2 of 4 ranks: "},
		{"--device-memory 24g", `--device-memory: "24g" is not a size; write 24GB, which is decimal, or 24GiB, which is binary`},
		{"--device-memory 99999999999999999999999", `--device-memory: "99999999999999999999999" is over the largest size, 4 EiB`},
		{"--device-memory 9223372036854775807", `--device-memory: "9223372036854775807" is over the largest size, 4 EiB`},
		{"--device-memory 99999999999EB", `--device-memory: "99999999999EB" is over the largest size, 4 EiB`},
		{"--recompute al", `spillway: --recompute al: policy "al" is not known`},
		{"--ranks 2 --fit --global-batch 1", "--global-batch 1 is not a multiple of 2 ranks; 2 is\n"},
		{"--ranks 2 --fit --global-batch 5", "--global-batch 5 is not a multiple of 2 ranks; 4 and 6 are; --reproducible gives each rank a share and pads the last micro-batch\n  spillway train "},
	} {
		got := command(tinyWith(strings.Fields(c.args)...)...)
		require.Equal(t, cli.ExitBadInput, got.status, c.args)
		require.Contains(t, got.stderr, c.want)
		lines := strings.Split(strings.TrimSuffix(got.stderr, "\n"), "\n")
		if strings.Contains(c.want, "\n  ") {
			require.Len(t, lines, 2)
			again := command(strings.Fields(strings.TrimPrefix(lines[1], "  spillway "))...)
			require.Zero(t, again.status, "%s: %s", lines[1], again.stderr)
			continue
		}
		require.Len(t, lines, 1, got.stderr)
	}
}

// An impossible folder is bad input, and so is one that cannot be written
// (TestDisksThatCannotBeUsed). A disk that fails during the run is a fault.
func TestDiskFoldersThatCannotBe(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("/proc is Linux's")
	}
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	for i, dir := range []string{"/proc/nope", filepath.Join(file, "sub"), file, filepath.Join(t.TempDir(), strings.Repeat("x", 300))} {
		for _, args := range [][]string{tinyWith("--disk", dir), tinyWith("--disk", dir, "--offload", "optimizer=disk"), {"doctor", "--disk", dir}} {
			if args[0] == "doctor" && i > 0 && !long.On() { // doctor measures the machine first
				continue
			}
			got := command(args...)
			require.Equal(t, cli.ExitBadInput, got.status, got.stderr)
			shown, _, _ := strings.Cut(dir, "xxxxx") // a long value is cut
			require.Contains(t, got.stderr, "spillway: --disk "+shown)
			require.Contains(t, got.stderr, ": disk tier: ")
		}
	}
}

func TestTrainTellsItsDisk(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "d")
	got := command(tinyWith("--disk", dir, "--offload", "optimizer=disk", "--steps", "1")...)
	require.Zero(t, got.status, got.stderr)
	require.Regexp(t, `memory of a rank: device .*, host .*, disk [0-9.]+ .?i?B\n`, got.stderr)
	got = command(tinyWith("--disk", dir, "--steps", "1")...)
	require.Zero(t, got.status, got.stderr)
	require.NotContains(t, got.stderr, ", disk ")
	_, err := os.Stat(dir)
	require.ErrorIs(t, err, os.ErrNotExist)
}

// Without --batch the micro-batch follows from --global-batch. Rows that the default does not
// divide are accepted, with a message; with --accum they must divide exactly.
func TestMicroBatchFollows(t *testing.T) {
	run := func(args string) result {
		return command(append([]string{"train", "--model", testdata + "/gpt2", "--data", testdata + "/text.bin", "--steps", "1", "--seq", "16"}, strings.Fields(args)...)...)
	}
	for _, c := range []struct{ args, want string }{
		{"--global-batch 6 --ranks 2", "micro-batch 3: --batch is left open, for --global-batch 6 over 2 ranks\n"},
		{"--global-batch 4 --ranks 2", "micro-batch 2: "},
		{"--global-batch 7", "micro-batch 1: "},
		{"--global-batch 6 --accum 1", "micro-batch 6: "},
		{"--global-batch 8", ""},
		{"--global-batch 6 --batch 2", ""},
		{"--batch-schedule 0:6,1:18 --ranks 2", "micro-batch 3: --batch is left open, for --batch-schedule 0:6,1:18 over 2 ranks\n"},
		{"--batch-schedule 0:8,1:16", ""},
	} {
		got := run(c.args)
		require.Zero(t, got.status, got.stderr)
		if c.want == "" {
			require.NotContains(t, got.stderr, "micro-batch")
		} else {
			require.Contains(t, got.stderr, c.want)
		}
	}
	for _, c := range []struct{ args, want string }{
		{"--global-batch 6 --accum 4", "--global-batch 6 is no multiple of --batch 4 rows; "},
		{"--global-batch 6 --ranks 4", "--global-batch 6 is neither a multiple of --batch 4 rows nor of 4 ranks; 3 or 6 ranks divide it; --reproducible with --batch 1 gives each rank a share"},
	} {
		got := run(c.args)
		require.Equal(t, cli.ExitBadInput, got.status, c.args)
		require.Contains(t, got.stderr, c.want)
	}
}

// An unknown command is an error of one line wherever it is named.
func TestUnknownTopics(t *testing.T) {
	for _, args := range []string{"pln", "help pln", "data tokenise", "help data tokenise"} {
		got := command(strings.Fields(args)...)
		require.Equal(t, cli.ExitBadInput, got.status, args)
		require.Regexp(t, `^spillway: spillway( data)? has no command "(pln|tokenise)"; did you mean (plan|tokenize)\?\n$`, got.stderr)
		require.Empty(t, got.stdout)
	}
	require.Zero(t, command("help", "data", "tokenize").status)
	require.Zero(t, command("help").status)
	require.Zero(t, command("--help").status)
}
