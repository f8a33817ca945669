// Command spillway plans and trains models that are larger than one device.
package main

import (
	"context"
	"errors"
	"io"
	"os"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
	ranks "github.com/spillway-ml/spillway/run"
)

// Exit statuses, as contracted.
const (
	exitDone        = 0
	exitBadInput    = 1
	exitDoesNotFit  = 2 // or a damaged checkpoint
	exitFault       = 3 // a rank was lost, or a run-time fault
	exitInterrupted = 130
)

func main() { os.Exit(execute(os.Args[1:], os.Stdout, os.Stderr)) }

// rootCommand is the command with all commands below it.
func rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "spillway",
		Short:         "Plan and train models that are larger than one device",
		Args:          noArguments,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.Version = versionText()
	root.SetVersionTemplate("spillway {{.Version}}\n")
	root.SetFlagErrorFunc(flagError)
	groupFlags(root)
	root.AddCommand(trainCommand(), launchCommand(), planCommand(), benchCommand(), doctorCommand(), dataCommand(), generateCommand(), evalCommand(), ckptCommand(), versionCommand())
	refuseUnknownTopics(root)
	completeValues(root)
	decimalNumbers(root)
	namedPaths(root)
	return root
}

// run is main without the process: it executes a command line and returns the
// exit status. Errors go to stderr, one line first.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := rootCommand()
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetArgs(args)
	nameShells(root)
	if err := refuseUnknownBeforeHelp(root, args); err != nil {
		printError(stderr, err, args, root)
		return exitBadInput
	}
	cmd, err := root.ExecuteContextC(ctx)
	lost := lostOutput(stdout)
	if o, ok := stdout.(*outlet); ok && errors.Is(lost, syscall.EPIPE) && goesOn(cmd) {
		o.warn()
	}
	if lost != nil && (err == nil || errors.Is(err, lost)) {
		return statusWithout(cmd, lost)
	}
	var silent *silentError
	var status *statusError
	if err != nil && !errors.As(err, &silent) && !errors.As(err, &status) {
		printError(stderr, err, args, cmd)
	}
	return exitStatus(err)
}

func exitStatus(err error) int {
	var refused *plan.DoesNotFit
	var op *device.OpError
	var fault *faultError
	var disk *store.Error
	var unpinned *cpu.PinError
	var missing *spillway.MissingDevice
	var call *driver.Error
	var status *statusError
	var remote *ranks.RemoteError
	var diverged *spillway.Diverged
	switch {
	case err == nil:
		return exitDone
	case errors.As(err, &status):
		return status.status
	case errors.Is(err, context.Canceled):
		return exitInterrupted
	case errors.As(err, &missing):
		return exitBadInput
	case errors.As(err, &refused), errors.Is(err, spillway.ErrDoesNotFit), errors.Is(err, checkpoint.ErrDamaged), errors.As(err, &remote) && remote.DoesNotFit():
		return exitDoesNotFit
	case errors.As(err, &remote) && remote.Fault(), errors.Is(err, comm.ErrLost):
		return exitFault
	case errors.As(err, &op), errors.As(err, &fault), errors.As(err, &disk), errors.As(err, &unpinned), errors.As(err, &call), errors.As(err, &diverged), errors.Is(err, comm.ErrTimeout), errors.Is(err, comm.ErrAborted), errors.Is(err, comm.ErrMismatch):
		return exitFault
	}
	return exitBadInput
}

// faultError marks what went wrong while running, as opposed to bad input.
type faultError struct{ err error }

func (e *faultError) Error() string { return e.err.Error() }
func (e *faultError) Unwrap() error { return e.err }

func fault(err error) error {
	if err == nil {
		return nil
	}
	return &faultError{err}
}
