package cli

import (
	"errors"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// pathFlag is a flag with a file or folder. It rejects an empty value, which would mean none and is
// usually an unset variable of the shell.
type pathFlag struct{ pflag.Value }

func (f pathFlag) Set(s string) error {
	if s == "" {
		return errors.New("the path is empty; leave the flag out for none")
	}
	return f.Value.Set(s)
}

// NamedPaths makes every flag of a command and its subcommands a pathFlag if help calls its value
// FILE, DIR or PATH.
func NamedPaths(cmd *cobra.Command) {
	eachFlag(cmd, func(f *pflag.Flag) {
		if _, done := f.Value.(pathFlag); done || f.Value.Type() != "string" {
			return
		}
		switch name, _ := pflag.UnquoteUsage(f); name {
		case "FILE", "DIR", "PATH":
			f.Value = pathFlag{f.Value}
		}
	})
}
