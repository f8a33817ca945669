package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway/internal/crash"
)

// execute runs a command line as this process and returns its exit status. It is
// where signals, panics and what is wrong with the standard streams are dealt with.
//
// The first SIGINT, SIGTERM or SIGHUP cancels the command's context. A command that
// has a state to save (see shelter) then ends by itself. Any other command has nothing
// to lose and may be in code that cannot be interrupted: it has promptly to return, then
// the process exits without it. Signals within burst of the first count as one with it;
// a later one ends the process at once, with the signal's default effect. Signals that
// were ignored when the process started (nohup) stay ignored.
func execute(args []string, stdout, stderr *os.File) int {
	errs := &outlet{file: stderr}
	out := &outlet{file: stdout, tell: errs, name: "stdout"}
	crash.Handle(func(what string) { die(errs, what) })
	debug.SetTraceback("crash") // a crash of Go's runtime ends in SIGABRT: its exit status 2 would mean "does not fit"
	signals := make(chan os.Signal, 2)
	catch(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	signal.Ignore(syscall.SIGPIPE) // a reader that left is an error of the write; last, which tests see
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	status := make(chan int, 1)
	go func() {
		defer crash.Guard()
		status <- run(ctx, args, out, errs)
	}()
	var late <-chan time.Time
	var first time.Time
	for {
		select {
		case code := <-status:
			return code
		case s := <-signals:
			switch {
			case first.IsZero():
				first = time.Now()
				cancel()
				late = time.After(promptly)
			case time.Since(first) >= burst:
				again(s) // without a word: a stream may be what it waits for
				return exitInterrupted
			}
		case <-late:
			if sheltered.Load() == 0 {
				errs.leaveLine()
				fmt.Fprintln(errs, "spillway: interrupted")
				return exitInterrupted
			}
			late = time.After(promptly)
		}
	}
}

// die ends the process because of a panic: a line, and the status of a fault.
func die(errs *outlet, what string) {
	errs.leaveLine()
	fmt.Fprintf(errs, "spillway: internal error, please report it: %s\n", what)
	os.Exit(exitFault)
}

// burst is the time after a first signal in which others mean the same: timeout(1)
// signals its child and then its group, a terminal that closes hangs up twice, and a
// person presses a key again.
const burst = 2 * time.Second

// catch has signals sent to c, but for those that were ignored when the process
// started.
func catch(c chan<- os.Signal, list ...os.Signal) {
	for _, s := range list {
		if !signal.Ignored(s) {
			signal.Notify(c, s)
		}
	}
}

// promptly is how long a command has to end by itself when it is interrupted.
const promptly = 300 * time.Millisecond

// sheltered counts what a signal must not cut off.
var sheltered atomic.Int32

// shelter keeps the process alive, after a signal, until what it returns is called:
// somebody has a state to save, and looks at the context.
func shelter() (leave func()) {
	sheltered.Add(1)
	return func() { sheltered.Add(-1) }
}

// again gives a signal its usual effect.
func again(s os.Signal) {
	signal.Reset(s)
	if p, err := os.FindProcess(os.Getpid()); err == nil && p.Signal(s) == nil {
		time.Sleep(time.Second) // it ends us
	}
}

// outlet is a standard stream. After a write has failed (a full disk, a pipe that
// nobody reads any more) nothing more is tried; the first time is told to tell.
type outlet struct {
	file *os.File
	name string
	tell io.Writer // nil: nobody is left to tell

	mu   sync.Mutex
	err  error
	live bool // a live line stands at its end
}

// Write writes to the file, or returns why it could not earlier.
func (o *outlet) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err != nil {
		return 0, o.err
	}
	o.live = bytes.HasSuffix(b, []byte(toLineEnd)) && string(b) != "\r"+toLineEnd
	n, err := o.file.Write(b)
	if o.err = err; err != nil && !errors.Is(err, syscall.EPIPE) {
		o.warn()
	}
	return n, err
}

// leaveLine goes to the next line where a live line stands, of somebody who is left
// behind.
func (o *outlet) leaveLine() {
	o.mu.Lock()
	live := o.live
	o.mu.Unlock()
	if live {
		fmt.Fprintln(o)
	}
}

// warn says that the rest of the output is lost. Of a reader that left (head, less) only
// what goes on without it says so.
func (o *outlet) warn() {
	if o.tell != nil {
		fmt.Fprintf(o.tell, "warning: %s: %v; the rest of the output is lost\n", o.name, o.err)
	}
}

// lostOutput is why a standard stream could not take all that was written; nil if
// it did.
func lostOutput(w io.Writer) error {
	o, ok := w.(*outlet)
	if !ok {
		return nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err
}

// statusWithout is the exit status of a command that did all it was asked for, but
// whose standard output was lost. A reader that left has had enough; for a run what
// counts is its checkpoint; what else a command prints is what was asked for.
func statusWithout(cmd *cobra.Command, lost error) int {
	if errors.Is(lost, syscall.EPIPE) || goesOn(cmd) {
		return exitDone
	}
	return exitBadInput
}

// goesOn says that a command has more to do than to print.
func goesOn(cmd *cobra.Command) bool { return cmd.Name() == "train" || cmd.Name() == "launch" }

// fileOf returns the file behind a writer, for who asks whether it is a terminal.
func fileOf(w io.Writer) (*os.File, bool) {
	switch v := w.(type) {
	case *os.File:
		return v, true
	case *outlet:
		return v.file, true
	}
	return nil, false
}
