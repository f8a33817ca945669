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

// Execute runs a command line as this process and returns its exit status. It is
// where signals, panics and what is wrong with the standard streams are dealt with.
//
// The first SIGINT, SIGTERM or SIGHUP cancels the command's context, but for a SIGINT that
// the command takes (cli.OnInterrupt). A command that
// has a state to save (see shelter) then ends by itself. Any other command has nothing
// to lose and may be in code that cannot be interrupted: it has promptly to return, then
// the process exits without it. Signals within burst of the first count as one with it;
// a later one ends the process at once, with the signal's default effect. Signals that
// were ignored when the process started (nohup) stay ignored.
func Execute(args []string, stdout, stderr *os.File) int {
	errs := &cli.Outlet{File: stderr}
	out := &cli.Outlet{File: stdout, Tell: errs, Name: "stdout"}
	crash.Handle(func(what string) { Die(errs, what) })
	debug.SetTraceback("crash") // a crash of Go's runtime ends in SIGABRT: its exit status 2 would mean "does not fit"
	signals := make(chan os.Signal, 2)
	cli.Catch(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	signal.Ignore(syscall.SIGPIPE) // a reader that left is an error of the write; last, which tests see
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
				cli.Again(s) // without a word: a stream may be what it waits for
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

// Die ends the process because of a panic: a line, and the status of a fault.
func Die(errs *cli.Outlet, what string) {
	errs.LeaveLine()
	fmt.Fprintf(errs, "spillway: internal error, please report it: %s\n", what)
	os.Exit(cli.ExitFault)
}
