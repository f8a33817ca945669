package cli

import (
	"errors"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// pathFlag is a flag of a file or folder. An empty one is mostly a variable of the
// shell that is not set, and would mean: none.
type pathFlag struct{ pflag.Value }

func (f pathFlag) Set(s string) error {
	if s == "" {
		return errors.New("the path is empty; leave the flag out for none")
	}
	return f.Value.Set(s)
}

// NamedPaths makes every flag whose help calls its value a file, folder or path a
// pathFlag, of a command and of those below it.
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
