package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/planner"
)

// PrintError prints the error that ended a command as one line. After a refusal it prints a
// complete command for each alternative that fits, one a line.
func PrintError(w io.Writer, err error, args []string, cmd *cobra.Command) {
	if errors.Is(err, context.Canceled) && !is[Interrupted](err) {
		err = Interrupted("interrupted") // in a search
	}
	env, wrong := cluster.Read(os.Getenv)
	if wrong != nil {
		env = cluster.Env{World: 1}
	}
	refused, ok := errors.AsType[*planner.Refusal](err)
	if !ok {
		fmt.Fprintln(w, "spillway:", Visible(tame(Flagged(err.Error()), slices.Concat(args, setValues(cmd)))))
		if field, ok := errors.AsType[*config.FieldError](err); ok && len(field.Instead) > 0 {
			args, flags := slices.Clone(args), []string(nil)
			for _, set := range field.Instead {
				name, value, has := strings.Cut(set, "=")
				if name = "--" + FlagOf("Config."+name); has {
					flags = append(flags, name, value)
				} else {
					args = append(args, name)
				}
			}
			fmt.Fprintln(w, "  "+WholeCommand(env, env.World, 1, args, flags))
		}
		return
	}
	fmt.Fprintf(w, "spillway: %s; it fits as:\n", Flagged(refused.Cause.Error()))
	global := cmd.Flags().Lookup("global-batch")
	for _, way := range refused.Ways {
		flags := ArgsOf(way.Changes)
		if c := way.Forecast.Config; global != nil && global.Changed {
			flags = append(slices.Clone(flags), "--global-batch", fmt.Sprint(c.StepRows()))
		}
		each, _ := cmd.Flags().GetInt("ranks-per-process") // 0 where the command has no such flag
		line := "  " + WholeCommand(env, way.Forecast.Config.Ranks, max(each, 1), args, flags)
		if way.Cost != "" {
			line += "  # " + way.Cost
		}
		fmt.Fprintln(w, line)
	}
}

// WholeCommand returns a command that starts a job with the launcher of env's job. ranks is the
// number of ranks, each the number of ranks per process. flags replace those of the same names
// among args.
func WholeCommand(env cluster.Env, ranks, each int, args, flags []string) string {
	if env.World == 1 {
		return "spillway " + planner.Shell(WithFlags(args, flags))
	}
	args, flags = WithFlags(args, []string{"--ranks", ""}), WithFlags(flags, []string{"--ranks", ""})
	args, flags = args[:len(args)-2], flags[:len(flags)-2] // the number of processes implies it
	if ranks%each != 0 {
		each, flags = 1, append(flags, "--ranks-per-process", "1")
	}
	n, launcher := ranks/each, ""
	switch env.Source {
	case cluster.Launch:
		launcher = fmt.Sprintf("spillway launch -n %d -- ", n)
	case cluster.OpenMPI:
		launcher = fmt.Sprintf("mpirun -np %d spillway ", n)
	case cluster.Slurm:
		launcher = fmt.Sprintf("srun -n %d spillway ", n)
	case cluster.PMI, cluster.PMIx:
		launcher = fmt.Sprintf("mpirun -np %d spillway ", n)
		if os.Getenv("SLURM_STEP_NUM_TASKS") != "" {
			launcher = fmt.Sprintf("srun -n %d spillway ", n)
		}
	default: // an orchestrator's agents start the processes; their number is set elsewhere
		whole := "spillway " + planner.Shell(WithFlags(args, flags))
		if n != env.World {
			whole += fmt.Sprintf("  # as %d processes", n)
		}
		return whole
	}
	return launcher + planner.Shell(WithFlags(args, flags))
}

// WithFlags returns args without the flags that occur in flags (pairs "--name", "value"), followed
// by flags.
func WithFlags(args, flags []string) []string {
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
