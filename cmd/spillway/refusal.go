package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway"
)

// printError tells a person what ended a command: one line, and after a refusal
// with ways out a whole command a line, to be copied.
func printError(w io.Writer, err error, args, values []string) {
	var refused *spillway.Refusal
	if !errors.As(err, &refused) {
		fmt.Fprintln(w, "spillway:", visible(tame(err.Error(), slices.Concat(args, values))))
		return
	}
	fmt.Fprintf(w, "spillway: %v; it fits as:\n", refused.Cause)
	for _, way := range refused.Ways {
		line := "  spillway " + spillway.Shell(withFlags(args, way.Args))
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
