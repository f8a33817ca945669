package main

import (
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/bench"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/ckpt"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/root"
)

func TestVersion(t *testing.T) {
	got := command("--version")
	require.Equal(t, 0, got.status)
	require.Regexp(t, `^spillway .+, go1\..+, \w+/\w+, CPU[\w, ]+\n$`, got.stdout)
	require.Empty(t, got.stderr)
	require.Equal(t, got.stdout, command("version").stdout)
}

func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		got := command("completion", shell)
		require.Equal(t, 0, got.status, got.stderr)
		require.Contains(t, got.stdout, "spillway", shell)
	}
	got := command("__complete", "train", "--model", "llama-3-")
	require.Equal(t, 0, got.status)
	require.Contains(t, got.stdout, "llama-3-8b\n")
	require.Contains(t, command("__complete", "plan", "--gpu", "h1").stdout, "h100-80\n")
}

// A command with a typo names the nearest, at every level.
func TestUnknownCommands(t *testing.T) {
	for args, want := range map[string]string{
		"tarin":            "train",
		"ckpt verfy x":     `spillway: spillway ckpt has no command "verfy"; did you mean verify?`,
		"data tokenise x":  `spillway: spillway data has no command "tokenise"; did you mean tokenize?`,
		"bench speed":      `spillway: spillway bench has no command "speed"; there are comm, scale, zero`,
		"train gpt2":       `spillway: argument "gpt2" is not understood; every value goes with its --flag`,
		"help nope":        `spillway: spillway has no command "nope"; there are bench`,
		"help trian":       "did you mean train?",
		"help train x":     `spillway: spillway train has no commands below it; "x" is not understood`,
		"trian --help":     "did you mean train?",
		"ckpt -h verfy":    "did you mean verify?",
		"completion":       "completion: name the shell: bash, fish, powershell or zsh",
		"completion bsh":   "did you mean bash?",
		"completion zsh x": `argument "x" is not understood`,
		"data inspect a":   `spillway: data inspect: "a" is not a token file, whose name ends in .bin; data tokenize makes one`,
	} {
		got := command(strings.Fields(args)...)
		require.Equal(t, cli.ExitBadInput, got.status, args)
		require.Contains(t, got.stderr, want)
		require.Empty(t, got.stdout)
	}
}

func TestHelpHasGroups(t *testing.T) {
	for _, cmd := range []string{"train", "plan", "bench zero"} {
		got := command(append(strings.Fields(cmd), "--help")...)
		require.Equal(t, 0, got.status)
		require.Empty(t, got.stderr)
		common, data := strings.Index(got.stdout, "\nCommon:\n"), strings.Index(got.stdout, "\nOptimizer:\n")
		require.True(t, common > 0 && data > common, "%s: common flags are not the first group", cmd)
		require.Contains(t, got.stdout[common:data], "--model NAME")
		seen := map[string]bool{}
		for _, m := range regexp.MustCompile(`(?m)^ {2,6}(?:-\w, )?--([\w-]+)`).FindAllStringSubmatch(got.stdout, -1) {
			require.False(t, seen[m[1]], "%s shows --%s twice", cmd, m[1])
			seen[m[1]] = true
		}
		require.Greater(t, len(seen), 20)
		for _, line := range strings.Split(got.stdout, "\n") {
			require.LessOrEqual(t, utf8.RuneCountInString(line), cli.Terminal, "a line of %s --help is wider than a terminal: %s", cmd, line)
		}
	}
	plan := command("plan", "--help").stdout
	require.NotContains(t, plan, "      --checkpoint", "what plan ignores is only named at its end")
	require.Contains(t, plan, "without effect here")
	require.NotContains(t, command("bench", "zero", "--help").stdout, "--resume", "what bench refuses is not in its help")
}

// Every command's help fits a terminal, except the examples.
func TestHelpIsAsWideAsATerminal(t *testing.T) {
	var visit func(cmd *cobra.Command, path []string)
	visited := 0
	visit = func(cmd *cobra.Command, path []string) {
		for _, sub := range cmd.Commands() {
			visit(sub, append(slices.Clone(path), sub.Name()))
		}
		if slices.Contains(path, "completion") {
			return // cobra generates its text
		}
		visited++
		got := command(append(path, "--help")...)
		require.Equal(t, 0, got.status, path)
		for _, line := range strings.Split(got.stdout, "\n") {
			if !strings.HasPrefix(line, "  spillway ") {
				require.LessOrEqual(t, utf8.RuneCountInString(line), cli.Terminal, "%s --help: %s", path, line)
			}
		}
	}
	visit(root.Command(), nil)
	require.Greater(t, visited, 12)
	require.Contains(t, command("bench", "comm", "--help").stdout, "(default 256MiB)")
	require.Contains(t, command("ckpt", "export", "--help").stdout, "(default 5GB)")
}

// The default size in help is the command's actual default.
func TestDefaultSizesInHelp(t *testing.T) {
	for _, d := range []struct {
		cmd  *cobra.Command
		flag string
	}{{bench.CommCommand(), "max-bytes"}, {ckpt.ExportCommand(), "max-shard-size"}} {
		f := d.cmd.Flags().Lookup(d.flag)
		shown, err := cli.ParseSize(f.DefValue)
		require.NoError(t, err)
		begins, err := cli.ParseSize(f.Value.String())
		require.NoError(t, err)
		require.Equal(t, begins, shown, d.flag)
	}
}

func TestUnknownFlagsNameTheNearest(t *testing.T) {
	for typed, meant := range map[string]string{"--modle": "--model", "--rank": "--ranks", "--zer": "--zero", "--ckeckpoint": "--checkpoint", "--learning": "train --help", "--device_memory": "--device-memory"} {
		got := command("train", typed, "1")
		require.Equal(t, 1, got.status)
		require.Contains(t, got.stderr, meant)
		require.Contains(t, got.stderr, "unknown flag "+typed)
		require.Equal(t, 1, strings.Count(got.stderr, "\n"))
	}
	long := command("train", "--"+strings.Repeat("x", 500))
	require.Less(t, len(long.stderr), 200)
	require.NotContains(t, command("train", "--a\x1b[2Jb").stderr, "\x1b")
	require.Contains(t, command(tinyWith("--config", writeFile(t, "c.yaml", "step: 2\n"))...).stderr, "did you mean steps?")
}

func TestRefusalsAreWholeCommands(t *testing.T) {
	got := command("train", "--zero=0", "--steps", "1", "--offload", "none", "--data-glob", "a b*.go")
	require.Equal(t, 2, got.status, got.stderr)
	lines := strings.Split(strings.TrimSuffix(got.stderr, "\n"), "\n")
	require.Greater(t, len(lines), 1)
	require.True(t, strings.HasPrefix(lines[0], "spillway: does not fit: "), lines[0])
	for _, line := range lines[1:] {
		require.True(t, strings.HasPrefix(line, "  spillway train --"), line)
		require.Contains(t, line, "--data-glob 'a b*.go'", "flags that were given stay")
		require.LessOrEqual(t, strings.Count(line, "--zero"), 1)
		require.LessOrEqual(t, strings.Count(line, "--offload"), 1)
		require.Contains(t, line, "--steps 1")
	}
}

func TestWithFlags(t *testing.T) {
	got := cli.WithFlags([]string{"plan", "--ranks", "8", "--zero=2", "--fit", "--batch", "4"}, []string{"--nodes", "2", "--gpus-per-node", "8", "--zero", "3"})
	require.Equal(t, []string{"plan", "--fit", "--batch", "4", "--nodes", "2", "--gpus-per-node", "8", "--zero", "3"}, got)
}
