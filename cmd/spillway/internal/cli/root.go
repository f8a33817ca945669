package cli

import (
	"context"
	"errors"
	"io"
	"syscall"

	"github.com/spf13/cobra"
)

// Root returns the command spillway with commands below it.
func Root(short string, commands ...*cobra.Command) *cobra.Command {
	root := &cobra.Command{
		Use:           "spillway",
		Short:         short,
		Args:          NoArguments,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.Version = VersionText()
	root.SetVersionTemplate("spillway {{.Version}}\n")
	root.SetFlagErrorFunc(FlagError)
	GroupFlags(root)
	root.AddCommand(commands...)
	RefuseUnknownTopics(root)
	CompleteValues(root)
	DecimalNumbers(root)
	NamedPaths(root)
	return root
}

// Execute runs a command line of root and returns the exit status. Errors go to stderr; their first
// line is the error.
func Execute(ctx context.Context, root *cobra.Command, args []string, stdout, stderr io.Writer) int {
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetArgs(args)
	NameShells(root)
	if err := RefuseUnknownBeforeHelp(root, args); err != nil {
		PrintError(stderr, err, args, root)
		return ExitBadInput
	}
	cmd, err := root.ExecuteContextC(ctx)
	lost := LostOutput(stdout)
	if o, ok := stdout.(*Outlet); ok && errors.Is(lost, syscall.EPIPE) && GoesOn(cmd) {
		o.Warn()
	}
	if lost != nil && (err == nil || errors.Is(err, lost)) {
		return statusWithout(cmd, lost)
	}
	if err != nil && !is[*SilentError](err) && !is[StatusError](err) {
		PrintError(stderr, err, args, cmd)
	}
	return ExitStatus(err)
}

// statusWithout returns the exit status of a command that succeeded but lost its standard output. A
// closed pipe is a success: its reader has enough. So is a lost output of train, finetune and
// launch, whose result is a checkpoint. For other commands the output is the result, so its loss is
// an error.
func statusWithout(cmd *cobra.Command, lost error) int {
	if errors.Is(lost, syscall.EPIPE) || GoesOn(cmd) {
		return ExitDone
	}
	return ExitStatus(lost)
}
