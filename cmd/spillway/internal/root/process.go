package root

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/internal/crash"
)

// Execute runs a command line as this process and returns its exit status. It handles signals,
// panics and errors of the standard streams.
//
// The first SIGINT, SIGTERM or SIGHUP cancels the command's context, except a SIGINT that the
// command handles (cli.OnInterrupt). A command that has a state to save (cli.Shelter) then ends
// when it is saved. Any other command must return within cli.Promptly: it may be in code that
// cannot be interrupted and has nothing to lose, so the process then exits without it. Signals
// within cli.Burst of the first count as one with it. A later signal ends the process at once, with
// its default effect. Signals that were ignored when the process started (nohup) stay ignored.
func Execute(args []string, stdout, stderr *os.File) int {
	errs := &cli.Outlet{File: stderr}
	out := &cli.Outlet{File: stdout, Tell: errs, Name: "stdout"}
	crash.Handle(func(what string) { Die(errs, what) })
	debug.SetTraceback("crash") // a crash of Go's runtime ends in SIGABRT: its exit status 2 would mean "does not fit"
	signals := make(chan os.Signal, 2)
	cli.Catch(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	signal.Ignore(syscall.SIGPIPE) // a closed pipe is an error of the write; last, as tests wait for it
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	status := make(chan int, 1)
	go func() {
		defer crash.Guard()
		status <- Run(ctx, args, out, errs)
	}()
	var late <-chan time.Time
	var first time.Time
	for {
		select {
		case code := <-status:
			return code
		case s := <-signals:
			switch {
			case first.IsZero() && s == os.Interrupt && cli.TakesInterrupt():
			case first.IsZero():
				first = time.Now()
				cancel()
				late = time.After(cli.Promptly)
			case time.Since(first) >= cli.Burst:
				cli.Again(s) // print nothing: the process may be blocked on a stream
				return cli.ExitInterrupted
			}
		case <-cli.Interrupts:
			cancel()
			late = time.After(cli.Promptly)
		case <-late:
			if cli.Sheltered.Load() == 0 {
				errs.LeaveLine()
				fmt.Fprintln(errs, "spillway: interrupted")
				return cli.ExitInterrupted
			}
			late = time.After(cli.Promptly)
		}
	}
}

// Die ends the process after a panic: it prints one line and exits with the status of a fault.
func Die(errs *cli.Outlet, what string) {
	errs.LeaveLine()
	fmt.Fprintf(errs, "spillway: internal error, please report it: %s\n", what)
	os.Exit(cli.ExitFault)
}
