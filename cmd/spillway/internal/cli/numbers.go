package cli

import (
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/internal/decimal"
)

// numberFlag is a flag with a number, which accepts decimal notation only.
type numberFlag struct {
	pflag.Value
	check func(string) error
}

func (f numberFlag) Set(s string) error {
	if err := f.check(s); err != nil {
		return err
	}
	return f.Value.Set(s)
}

// DecimalNumbers makes every number flag of a command and its subcommands a numberFlag.
func DecimalNumbers(cmd *cobra.Command) {
	eachFlag(cmd, func(f *pflag.Flag) {
		if _, done := f.Value.(numberFlag); done {
			return
		}
		switch f.Value.Type() {
		case "float32", "float64":
			f.Value = numberFlag{f.Value, decimal.CheckFloat}
		case "int", "int32", "int64", "uint", "uint32", "uint64":
			f.Value = numberFlag{f.Value, decimal.CheckInt}
		}
	})
}

// eachFlag calls f for every flag of a command and its subcommands, for some more than once.
func eachFlag(cmd *cobra.Command, f func(*pflag.Flag)) {
	cmd.Flags().VisitAll(f)
	cmd.PersistentFlags().VisitAll(f)
	for _, sub := range cmd.Commands() {
		eachFlag(sub, f)
	}
}
