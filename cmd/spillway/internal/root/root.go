// Package root assembles the command from all families of verbs, and runs it as a process.
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

// Command returns the root command with all commands below it.
func Command() *cobra.Command {
	return cli.Root("Plan and train models that are larger than one device", training.Command(), training.FinetuneCommand(),
		launching.Command(), planning.Command(here.Machine{}, nil), bench.Command(), doctor.Command(), tokens.Command(),
		infer.GenerateCommand(), infer.ChatCommand(), infer.EvalCommand(), ckpt.Command(), verifying.Command(), cli.VersionCommand())
}

// Run executes a command line without handling signals or panics, and returns the exit status.
// Errors go to stderr; their first line is the error.
func Run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	return cli.Execute(ctx, Command(), args, stdout, stderr)
}
