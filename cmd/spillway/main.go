// Command spillway plans and trains models that are larger than one device.
package main

import (
	"context"
	"errors"
	"io"
	"os"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/bench"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/ckpt"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/doctor"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/here"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/infer"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/launching"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/planning"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/relay"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/tokens"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/training"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/verifying"
)

func main() {
	status, relayed := relay.Run()
	if !relayed {
		status = execute(os.Args[1:], os.Stdout, os.Stderr)
	}
	os.Exit(status)
}

// rootCommand is the command with all commands below it.
func rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "spillway",
		Short:         "Plan and train models that are larger than one device",
		Args:          cli.NoArguments,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.Version = cli.VersionText()
	root.SetVersionTemplate("spillway {{.Version}}\n")
	root.SetFlagErrorFunc(cli.FlagError)
	cli.GroupFlags(root)
	root.AddCommand(training.Command(), training.FinetuneCommand(), launching.Command(), planning.Command(here.Machine{}, nil), bench.Command(), doctor.Command(), tokens.Command(), infer.GenerateCommand(), infer.ChatCommand(), infer.EvalCommand(), ckpt.Command(), verifying.Command(), cli.VersionCommand())
	cli.RefuseUnknownTopics(root)
	cli.CompleteValues(root)
	cli.DecimalNumbers(root)
	cli.NamedPaths(root)
	return root
}

// run is main without the process: it executes a command line and returns the
// exit status. Errors go to stderr, one line first.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := rootCommand()
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetArgs(args)
	cli.NameShells(root)
	if err := cli.RefuseUnknownBeforeHelp(root, args); err != nil {
		cli.PrintError(stderr, err, args, root)
		return cli.ExitBadInput
	}
	cmd, err := root.ExecuteContextC(ctx)
	lost := cli.LostOutput(stdout)
	if o, ok := stdout.(*cli.Outlet); ok && errors.Is(lost, syscall.EPIPE) && cli.GoesOn(cmd) {
		o.Warn()
	}
	if lost != nil && (err == nil || errors.Is(err, lost)) {
		return statusWithout(cmd, lost)
	}
	var silent *cli.SilentError
	var status cli.StatusError
	if err != nil && !errors.As(err, &silent) && !errors.As(err, &status) {
		cli.PrintError(stderr, err, args, cmd)
	}
	return cli.ExitStatus(err)
}
