package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/root"
)

var update = flag.Bool("update", false, "rewrite docs/flags.md")

// docs/flags.md is the help of every command.
func TestFlagsPage(t *testing.T) {
	var page bytes.Buffer
	fmt.Fprintln(&page, "# Flags\n\nThe help of every command. `go test ./cmd/spillway -run TestFlagsPage -update` rewrites this page.")
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Runnable() && !c.HasAvailableSubCommands() && c.Name() != "help" {
			fmt.Fprintf(&page, "\n## %s\n\n%s.\n\n```text\n%s```\n", c.CommandPath(), c.Short, c.UsageString())
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(root.Command())
	path := filepath.Join("..", "..", "docs", "flags.md")
	if *update {
		require.NoError(t, os.WriteFile(path, page.Bytes(), 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), page.String(), "docs/flags.md is not the commands' help: rewrite it with -update")
}
