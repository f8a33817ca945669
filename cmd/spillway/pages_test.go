package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/root"
	"github.com/spillway-ml/spillway/internal/testkit/pages"
)

// notOurs maps flags of other programs that pages mention to the program.
var notOurs = map[string]string{
	"--mpi":      "srun",
	"--signal":   "sbatch",
	"--mca":      "mpirun of Open MPI",
	"--map-by":   "mpirun of Open MPI",
	"--hostfile": "mpirun",

	"--ntasks-per-node":  "srun",
	"--gpus-per-task":    "srun",
	"--no-kill":          "srun",
	"--kill-on-bad-exit": "srun",
}

var (
	flagInText = regexp.MustCompile("(?:^|[\\s`(|\\[])(--[a-z][a-z0-9-]*)")
	commandIn  = regexp.MustCompile("(?:^|[`|(;&]|--)\\s*spillway ([a-z]+)\\b")
	packageIn  = regexp.MustCompile(`go (?:run|build|install|test|vet) (?:-o \S+ )?(\./[a-z][\w/-]*)`)
)

// Everything that a page names exists: flags, in blocks and in running text, commands, and packages
// that it runs. (internal/readme runs the commands.)
func TestPagesNameWhatIsThere(t *testing.T) {
	root := root.Command()
	flags := map[string]bool{"--help": true, "--version": true}
	commands := map[string]bool{"completion": true, "help": true}
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		c.LocalFlags().VisitAll(func(f *pflag.Flag) { flags["--"+f.Name] = true })
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(root)
	for _, sub := range root.Commands() {
		commands[sub.Name()] = true
	}
	seen, used := 0, map[string]bool{}
	top := filepath.Join("..", "..")
	page := func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && d.Name() == "testdata":
			return fs.SkipDir
		case d.IsDir() || filepath.Ext(path) != ".md":
			return nil
		}
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		for i, line := range strings.Split(string(text), "\n") {
			for _, m := range flagInText.FindAllStringSubmatch(line, -1) {
				seen++
				if notOurs[m[1]] != "" {
					used[m[1]] = true
				} else if !flags[m[1]] && !strings.Contains(line, "python3") && !strings.Contains(line, "docker ") {
					t.Errorf("%s:%d: no command has %s", path, i+1, m[1])
				}
			}
			for _, m := range commandIn.FindAllStringSubmatch(line, -1) {
				seen++
				if !commands[m[1]] {
					t.Errorf("%s:%d: there is no command spillway %s", path, i+1, m[1])
				}
			}
			for _, m := range packageIn.FindAllStringSubmatch(line, -1) {
				seen++
				if st, err := os.Stat(filepath.Join(top, m[1])); err != nil || !st.IsDir() {
					t.Errorf("%s:%d: there is no package %s", path, i+1, m[1])
				}
			}
		}
		return nil
	}
	for _, place := range pages.Places {
		require.NoError(t, filepath.WalkDir(filepath.Join(top, place), page))
	}
	require.Greater(t, seen, 200, "did the pages' form change?")
	for flag, program := range notOurs {
		require.True(t, used[flag], "no page gives %s to %s any more: drop it", flag, program)
	}
}
