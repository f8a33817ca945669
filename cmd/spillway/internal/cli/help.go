package cli

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/internal/nearest"
	"github.com/spillway-ml/spillway/model"
)

// flagGroup is a heading of a command's help with its flags, in the order in which help shows them.
type flagGroup struct {
	title string
	flags []string
}

// flagGroups are the groups of every command's flags, the most used first. A command shows the
// flags that it has; a flag in no group is shown under "Other".
var flagGroups = []flagGroup{
	{"Common", []string{"model", "init", "data", "tokenizer", "text-field", "steps", "epochs", "batch", "seq", "lr", "ranks", "zero", "device-memory", "gpu", "nodes", "gpus-per-node", "fit", "checkpoint", "resume", "metrics", "prompt", "prompts", "system", "stop", "tokens", "price", "temperature", "top-k", "top-p", "out", "json"}},
	{"Data", []string{"data-glob", "template", "loss-on", "long", "packing", "order", "eval-data", "eval-split", "eval-every", "eval-steps"}},
	{"Optimizer", []string{"optimizer", "lr-schedule", "warmup", "min-lr", "lr-scale", "lr-base-batch", "weight-decay", "beta1", "nesterov", "beta2", "eps", "clip", "accum", "global-batch", "batch-schedule", "rank-shares", "accum-order", "dropout", "freeze", "lora", "seed", "on-nonfinite", "trust", "adapt-all"}},
	{"Memory", []string{"host-memory", "node-memory", "disk", "recompute", "offload", "prefetch", "overlap", "disk-cache", "frozen-cache", "require-pinned", "allow"}},
	{"Precision and sums", []string{"precision", "bf16-rounding", "base", "reduce", "int8", "epilogues", "loss-scale", "loss-scale-hysteresis", "stochastic-rounding", "optimizer-dtype", "reproducible"}},
	{"Ranks and devices", []string{"device", "cuda-graphs", "threads", "ranks-per-process", "shard-size", "tensor", "tensor-slices", "pipeline", "pipeline-schedule", "stages",
		"transport", "collectives", "timeout", "min-ranks"}},
	{"Checkpoints and files", []string{"save-every", "async-save", "keep", "export", "merge", "format",
		"accept-changes", "receipt", "receipt-every", "segments", "trace", "tensorboard", "metrics-addr",
		"config", "from", "emit", "html", "svg", "dump"}},
}

// GroupFlags sets the usage of root and of every command below it.
func GroupFlags(root *cobra.Command) {
	root.SetUsageFunc(func(cmd *cobra.Command) error {
		printUsage(cmd.OutOrStderr(), cmd)
		return nil
	})
	root.SetHelpFunc(func(cmd *cobra.Command, _ []string) {
		w := cmd.OutOrStdout()
		printAbout(w, cmp.Or(cmd.Long, cmd.Short))
		fmt.Fprint(w, cmd.UsageString())
	})
}

// printAbout prints the description of a command in paragraphs of a terminal's width.
func printAbout(w io.Writer, text string) {
	for paragraph := range strings.SplitSeq(strings.TrimSpace(text), "\n\n") {
		Wrap(w, "", "", paragraph)
		fmt.Fprintln(w)
	}
}

func printUsage(w io.Writer, cmd *cobra.Command) {
	fmt.Fprintln(w, "Usage:")
	if cmd.Runnable() && !cmd.HasAvailableSubCommands() {
		fmt.Fprintf(w, "  %s\n", cmd.UseLine())
	}
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(w, "  %s COMMAND\n\nCommands:\n", cmd.CommandPath())
		for _, sub := range cmd.Commands() {
			if sub.IsAvailableCommand() || sub.Name() == "help" {
				name := fmt.Sprintf("  %-*s  ", cmd.NamePadding(), sub.Name())
				Wrap(w, name, strings.Repeat(" ", len(name)), sub.Short)
			}
		}
	}
	if cmd.HasExample() {
		fmt.Fprintf(w, "\nExamples:\n%s\n", cmd.Example)
	}
	left := pflag.NewFlagSet("other", pflag.ContinueOnError)
	left.AddFlagSet(cmd.LocalFlags())
	columns := columnsOf(w)
	for _, g := range flagGroups {
		set := pflag.NewFlagSet(g.title, pflag.ContinueOnError)
		set.SortFlags = false
		for _, name := range g.flags {
			if f := left.Lookup(name); f != nil {
				set.AddFlag(f)
			}
		}
		printFlags(w, g.title, set, columns)
		left = without(left, set)
	}
	printFlags(w, "Other", left, columns)
	if unused := unusedFlags(cmd.LocalFlags()); len(unused) > 0 {
		fmt.Fprintln(w)
		Wrap(w, "", "  ", "Accepted so that a train command can be reused, but without effect here except on "+
			"the host memory outside the arenas: "+strings.Join(unused, ", "))
	}
}

func printFlags(w io.Writer, title string, set *pflag.FlagSet, columns int) {
	if set.HasAvailableFlags() {
		fmt.Fprintf(w, "\n%s:\n%s", title, set.FlagUsagesWrapped(columns))
	}
}

// without returns the flags of set that are not in other.
func without(set, other *pflag.FlagSet) *pflag.FlagSet {
	rest := pflag.NewFlagSet("", pflag.ContinueOnError)
	set.VisitAll(func(f *pflag.Flag) {
		if other.Lookup(f.Name) == nil {
			rest.AddFlag(f)
		}
	})
	return rest
}

// Hide removes flags from a command's help that it accepts and that have no effect on it.
func Hide(fs *pflag.FlagSet, names ...string) {
	for _, name := range names {
		if f := fs.Lookup(name); f != nil {
			f.Hidden = true
			f.Annotations = map[string][]string{noEffect: nil}
		}
	}
}

// noEffect marks a flag that a command accepts and does not use.
const noEffect = "spillway_no_effect"

func unusedFlags(fs *pflag.FlagSet) (list []string) {
	fs.VisitAll(func(f *pflag.Flag) {
		if _, unused := f.Annotations[noEffect]; unused {
			list = append(list, "--"+f.Name)
		}
	})
	slices.Sort(list)
	return list
}

// columnsOf returns the width of the terminal behind w, or 80 if there is none.
func columnsOf(w io.Writer) int {
	if f, ok := FileOf(w); ok {
		if n, _, err := term.GetSize(int(f.Fd())); err == nil && n > 0 {
			return n
		}
	}
	return Terminal
}

// unknownFlag matches pflag's error for an unknown flag.
var unknownFlag = regexp.MustCompile(`^unknown flag: --(.*)$`)

// FlagError rewords an error about a flag of a command. For an unknown flag it suggests the nearest
// name.
func FlagError(cmd *cobra.Command, err error) error {
	m := unknownFlag.FindStringSubmatch(err.Error())
	if m == nil {
		return PlainFlagError(err)
	}
	text := fmt.Sprintf("unknown flag --%s", Cut(m[1]))
	if name := nearestFlag(cmd.Flags(), m[1]); name != "" {
		text += "; did you mean --" + name + "?"
	} else {
		text += fmt.Sprintf("; %s --help lists those that there are", cmd.CommandPath())
	}
	return errors.New(text)
}

// RefuseUnknownTopics makes help of an unknown command an error.
func RefuseUnknownTopics(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	for _, help := range root.Commands() {
		if help.Name() != "help" {
			continue
		}
		show := help.Run
		help.Run, help.RunE = nil, func(help *cobra.Command, args []string) error {
			if cmd, rest, err := root.Find(args); err != nil || len(rest) > 0 {
				return unknownCommand(cmd, append(rest, "")[0])
			}
			show(help, args)
			return nil
		}
	}
}

// RefuseUnknownBeforeHelp makes --help of an unknown command an error; cobra would show the help of
// the command above it.
func RefuseUnknownBeforeHelp(root *cobra.Command, args []string) error {
	cmd, rest, err := root.Find(args)
	if err != nil || !cmd.HasSubCommands() || !slices.Contains(rest, "--help") && !slices.Contains(rest, "-h") {
		return nil // executing the command reports the error
	}
	for _, word := range rest {
		if !strings.HasPrefix(word, "-") {
			return unknownCommand(cmd, word)
		}
	}
	return nil
}

// NameShells makes completion without a shell, or with an unknown one, an error. root's output must
// be set before.
func NameShells(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	for _, completion := range root.Commands() {
		if completion.Name() != "completion" {
			continue
		}
		completion.Args = NoArguments
		completion.RunE = func(*cobra.Command, []string) error {
			return errors.New("completion: name the shell: bash, fish, powershell or zsh")
		}
		for _, shell := range completion.Commands() {
			shell.Args = NoArguments
		}
	}
}

// unknownCommand returns the error for an unknown command below cmd, with the nearest name.
func unknownCommand(cmd *cobra.Command, typed string) error {
	if !cmd.HasSubCommands() {
		return fmt.Errorf(`%s has no commands below it; "%s" is not understood`, cmd.CommandPath(), Cut(typed))
	}
	var names []string
	var entries [][]string
	for _, sub := range cmd.Commands() {
		names = append(names, sub.Name())
		entries = append(entries, []string{sub.Name()})
	}
	text := fmt.Sprintf(`%s has no command "%s"`, cmd.CommandPath(), Cut(typed))
	if best := nearest.Names(typed, entries, 1); len(best) > 0 && nearest.Distance(typed, best[0]) <= max(2, len(typed)/3) {
		return fmt.Errorf("%s; did you mean %s?", text, best[0])
	}
	return fmt.Errorf("%s; there are %s", text, strings.Join(names, ", "))
}

// nearestFlag returns the name of the flag nearest to typed, or "" if none is near.
func nearestFlag(fs *pflag.FlagSet, typed string) string {
	var names [][]string
	fs.VisitAll(func(f *pflag.Flag) { names = append(names, []string{f.Name}) })
	best := nearest.Names(typed, names, 1)
	if len(best) == 0 || nearest.Distance(typed, best[0]) > max(2, len(typed)/3) {
		return ""
	}
	return best[0]
}

// Cut shortens what a person typed to 80 characters and escapes control bytes.
func Cut(s string) string {
	if r := []rune(s); len(r) > 80 {
		s = string(r[:79]) + "…"
	}
	return escaped(s)
}

// CompleteValues registers shell completions for flags whose values are names.
func CompleteValues(cmd *cobra.Command) {
	lists := map[string]func() []string{
		"model": func() (names []string) {
			for _, p := range model.Presets() {
				names = append(names, p.Name)
			}
			return names
		},
		"gpu": func() (names []string) {
			for _, g := range gpus.List() {
				names = append(names, g.Name)
			}
			return append(names, "detect")
		},
		"zero":      func() []string { return []string{"0", "1", "2", "3"} },
		"device":    func() []string { return []string{"cpu", "cuda"} },
		"order":     func() []string { return []string{"sequential", "shuffled"} },
		"precision": func() []string { return []string{"fp32", "bf16", "fp16"} },
		"recompute": func() []string { return []string{"none", "selective", "full", "auto"} },
	}
	for name, list := range lists {
		if cmd.Flags().Lookup(name) == nil {
			continue
		}
		directive := cobra.ShellCompDirectiveNoFileComp
		if name == "model" {
			directive = cobra.ShellCompDirectiveDefault // a folder is possible too
		}
		_ = cmd.RegisterFlagCompletionFunc(name, func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return list(), directive
		}) // fails only if the flag has one already
	}
	for _, sub := range cmd.Commands() {
		CompleteValues(sub)
	}
}

// NoArguments rejects words of a command line that belong to no flag.
func NoArguments(cmd *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return nil
	case cmd.HasSubCommands():
		return unknownCommand(cmd, args[0])
	}
	return fmt.Errorf(`argument "%s" is not understood; every value goes with its --flag`, Cut(args[0]))
}
