// Package root is the whole command: every family of verbs below one root, and the process
// around it.
package root

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/bench"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/ckpt"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/doctor"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/here"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/infer"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/launching"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/planning"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/tokens"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/training"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/verifying"
)

// Command is the command with all commands below it.
func Command() *cobra.Command {
	return cli.Root("Plan and train models that are larger than one device", training.Command(), training.FinetuneCommand(),
		launching.Command(), planning.Command(here.Machine{}, nil), bench.Command(), doctor.Command(), tokens.Command(),
		infer.GenerateCommand(), infer.ChatCommand(), infer.EvalCommand(), ckpt.Command(), verifying.Command(), cli.VersionCommand())
}

// Run executes a command line without a process around it and returns the exit status.
// Errors go to stderr, one line first.
func Run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	return cli.Execute(ctx, Command(), args, stdout, stderr)
}
