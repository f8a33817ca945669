package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"syscall"

	"github.com/spf13/cobra"
)

// Outlet is a standard stream. After a failed write (a full disk, a closed pipe) it writes nothing
// more. It reports the first failure to Tell, except a closed pipe (see Warn).
type Outlet struct {
	File *os.File
	Name string
	Tell io.Writer // nil: failures are not reported

	mu   sync.Mutex
	err  error
	live bool // the last write was a live line
}

// Write writes to the file. After a failed write it only returns that error.
func (o *Outlet) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err != nil {
		return 0, o.err
	}
	o.live = bytes.HasSuffix(b, []byte(toLineEnd)) && string(b) != "\r"+toLineEnd
	n, err := o.File.Write(b)
	if o.err = err; err != nil && !errors.Is(err, syscall.EPIPE) {
		o.Warn()
	}
	return n, err
}

// LeaveLine ends a live line that was left on the stream, so that the next text begins a new line.
func (o *Outlet) LeaveLine() {
	o.mu.Lock()
	live := o.live
	o.mu.Unlock()
	if live {
		fmt.Fprintln(o)
	}
}

// Warn reports to Tell that the rest of the output is lost. After a closed pipe (head, less) only
// commands that continue without it call Warn.
func (o *Outlet) Warn() {
	if o.Tell != nil {
		fmt.Fprintf(o.Tell, "warning: %s: %v; the rest of the output is lost\n", o.Name, o.err)
	}
}

// LostOutput returns the error of a standard stream's first failed write, and nil if none failed.
func LostOutput(w io.Writer) error {
	o, ok := w.(*Outlet)
	if !ok {
		return nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err
}

// GoesOn reports whether a command continues when its standard output is closed: it does more than
// print.
func GoesOn(cmd *cobra.Command) bool {
	return slices.Contains([]string{"train", "finetune", "launch"}, cmd.Name())
}

// FileOf returns the file behind a writer, from which callers see whether it is a terminal.
func FileOf(w io.Writer) (*os.File, bool) {
	switch v := w.(type) {
	case *os.File:
		return v, true
	case *Outlet:
		return v.File, true
	}
	return nil, false
}
