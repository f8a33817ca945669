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

// Outlet is a standard stream. After a write has failed (a full disk, a pipe that
// nobody reads any more) nothing more is tried; the first time is told to tell.
type Outlet struct {
	File *os.File
	Name string
	Tell io.Writer // nil: nobody is left to tell

	mu   sync.Mutex
	err  error
	live bool // a live line stands at its end
}

// Write writes to the file, or returns why it could not earlier.
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

// LeaveLine goes to the next line where a live line stands, of somebody who is left
// behind.
func (o *Outlet) LeaveLine() {
	o.mu.Lock()
	live := o.live
	o.mu.Unlock()
	if live {
		fmt.Fprintln(o)
	}
}

// Warn says that the rest of the output is lost. Of a reader that left (head, less) only
// what goes on without it says so.
func (o *Outlet) Warn() {
	if o.Tell != nil {
		fmt.Fprintf(o.Tell, "warning: %s: %v; the rest of the output is lost\n", o.Name, o.err)
	}
}

// LostOutput is why a standard stream could not take all that was written; nil if
// it did.
func LostOutput(w io.Writer) error {
	o, ok := w.(*Outlet)
	if !ok {
		return nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err
}

// GoesOn says that a command has more to do than to print.
func GoesOn(cmd *cobra.Command) bool {
	return slices.Contains([]string{"train", "finetune", "launch"}, cmd.Name())
}

// FileOf returns the file behind a writer, for who asks whether it is a terminal.
func FileOf(w io.Writer) (*os.File, bool) {
	switch v := w.(type) {
	case *os.File:
		return v, true
	case *Outlet:
		return v.File, true
	}
	return nil, false
}
