package cli

import (
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/internal/decimal"
)

// numberFlag is a flag of a number that takes decimal forms only.
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

// DecimalNumbers makes every flag of a number, of a command and of those below it,
// a numberFlag.
func DecimalNumbers(cmd *cobra.Command) {
	for _, fs := range []*pflag.FlagSet{cmd.Flags(), cmd.PersistentFlags()} {
		fs.VisitAll(func(f *pflag.Flag) {
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
	for _, sub := range cmd.Commands() {
		DecimalNumbers(sub)
	}
}
