// Package bench implements the command bench.
package bench

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
)

// Command returns the command bench, with zero, scale and comm below it.
func Command() *cobra.Command {
	bench := &cobra.Command{Use: "bench", Short: "Measure", Args: cli.NoArguments,
		RunE: func(*cobra.Command, []string) error {
			return errors.New("bench: name what to measure: zero, scale or comm")
		}}
	bench.AddCommand(zeroCommand(), scaleCommand(), CommCommand())
	return bench
}
