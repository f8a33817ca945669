// Command spillway plans and trains models that are larger than one device.
package main

import (
	"context"
	"io"
	"os"

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
	return cli.Root("Plan and train models that are larger than one device", training.Command(), training.FinetuneCommand(), launching.Command(), planning.Command(here.Machine{}, nil), bench.Command(), doctor.Command(), tokens.Command(), infer.GenerateCommand(), infer.ChatCommand(), infer.EvalCommand(), ckpt.Command(), verifying.Command(), cli.VersionCommand())
}

// run is main without the process: it executes a command line and returns the
// exit status. Errors go to stderr, one line first.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	return cli.Execute(ctx, rootCommand(), args, stdout, stderr)
}
