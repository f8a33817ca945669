package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway"
	trainer "github.com/spillway-ml/spillway/train"
)

// printError tells a person what ended a command: one line, and after a refusal
// with ways out a whole command a line, to be copied.
func printError(w io.Writer, err error, args []string, cmd *cobra.Command) {
	var said *interrupted
	if errors.Is(err, context.Canceled) && !errors.As(err, &said) {
		err = &interrupted{"interrupted"} // in a search
	}
	var refused *spillway.Refusal
	if !errors.As(err, &refused) {
		fmt.Fprintln(w, "spillway:", visible(tame(flagged(err.Error()), slices.Concat(args, setValues(cmd)))))
		return
	}
	fmt.Fprintf(w, "spillway: %s; it fits as:\n", flagged(refused.Cause.Error()))
	global := cmd.Flags().Lookup("global-batch")
	for _, way := range refused.Ways {
		flags := argsOf(way.Changes)
		if c := way.Forecast.Config; global != nil && global.Changed {
			flags = append(slices.Clone(flags), "--global-batch", fmt.Sprint(c.Ranks*c.Batch*c.Accum))
		}
		line := "  spillway " + trainer.Shell(withFlags(args, flags))
		if way.Cost != "" {
			line += "  # " + way.Cost
		}
		fmt.Fprintln(w, line)
	}
}

// withFlags returns a command line in which flags (each "--name", "value")
// replace those of the same names, at its end.
func withFlags(args, flags []string) []string {
	replaced := map[string]bool{}
	for i := 0; i < len(flags); i += 2 {
		replaced[flags[i]] = true
	}
	if replaced["--nodes"] {
		replaced["--ranks"] = true // their product
	}
	var out []string
	for i := 0; i < len(args); i++ {
		name, _, joined := strings.Cut(args[i], "=")
		switch {
		case !replaced[name]:
			out = append(out, args[i])
		case !joined:
			i++ // its value
		}
	}
	return append(out, flags...)
}
