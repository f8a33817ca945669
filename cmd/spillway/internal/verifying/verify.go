// Package verifying implements the command verify.
package verifying

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/train/receipts"
)

// again holds the flags of train that verify has too: how steps run again, and the present paths of
// the run's inputs.
var again = map[string]func(to, from *spillway.Config){
	"model":         func(to, from *spillway.Config) { to.Model = from.Model },
	"init":          func(to, from *spillway.Config) { to.Init = from.Init },
	"data":          func(to, from *spillway.Config) { to.Data = from.Data },
	"tokenizer":     func(to, from *spillway.Config) { to.Tokenizer = from.Tokenizer },
	"template":      func(to, from *spillway.Config) { to.Template = from.Template },
	"ranks":         func(to, from *spillway.Config) { to.Ranks = from.Ranks },
	"zero":          func(to, from *spillway.Config) { to.Zero = from.Zero },
	"device-memory": func(to, from *spillway.Config) { to.DeviceMemory = from.DeviceMemory },
	"host-memory":   func(to, from *spillway.Config) { to.HostMemory = from.HostMemory },
	"disk":          func(to, from *spillway.Config) { to.Disk, to.DiskMemory = from.Disk, from.DiskMemory },
	"disk-cache":    func(to, from *spillway.Config) { to.DiskCache = from.DiskCache },
	"recompute":     func(to, from *spillway.Config) { to.Recompute = from.Recompute },
	"offload":       func(to, from *spillway.Config) { to.Offload = from.Offload },
	"prefetch":      func(to, from *spillway.Config) { to.Prefetch = from.Prefetch },
	"threads":       func(to, from *spillway.Config) { to.Threads = from.Threads },
	"timeout":       func(to, from *spillway.Config) { to.Timeout = from.Timeout },
}

// Command returns the command verify.
func Command() *cobra.Command {
	var c spillway.Config
	var v spillway.Verification
	segments := "all"
	cmd := &cobra.Command{
		Use:   "verify RUN",
		Short: "Check a run's receipt by running parts of the run again",
		Long: `Check the hash chain of a run's receipt (train --receipt), and run segments of the
run again. A segment is the steps from one checkpoint to the next. RUN is the folder
of its checkpoints, or the receipt of a run without one.

Segments of a run with --reproducible may use any --ranks, --zero, --offload and
--recompute that fit this machine; those of others need the run's number of ranks.
If the bits differ, the first difference is printed: the step, the differing value
and the range of a tensor. Each segment runs in one process.

Status 0: all steps that ran again are equal; 2: something differs, or the chain breaks;
1: bad input.`,
		Example: "  spillway verify run1\n  spillway verify run1 --segments 3 --ranks 2 --offload optimizer=host\n  spillway verify run1 --segments 100-200,900-1000",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("verify: name one folder of checkpoints or receipt; %d were given", len(args))
			}
			return nil
		},
	}
	all := pflag.NewFlagSet("train", pflag.ContinueOnError)
	options.Train(all, &c, &options.Later{})
	fs := cmd.Flags()
	for name := range again {
		f := all.Lookup(name)
		f.Usage = usage(name, f.Usage)
		switch name {
		case "ranks":
			f.DefValue = "the run's, or 1 if it was --reproducible"
		case "init":
			f.DefValue = "the run's path"
		case "zero":
			f.DefValue = "3, or the run's if the bits depend on the stage"
		}
		fs.AddFlag(f)
	}
	fs.StringVar(&v.Receipt, "receipt", "", "receipt `FILE` (default: the one that the newest checkpoint names)")
	fs.StringVar(&segments, "segments", segments, "segments to run again: all; a number N of them, drawn at random; or steps, as in 100-200,900-1000")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		choose, err := parseSegments(segments)
		if err != nil {
			return err
		}
		v.Choose = choose
		st, err := os.Stat(args[0])
		switch {
		case err != nil:
			return fmt.Errorf("verify: %w", err)
		case st.IsDir():
			v.Checkpoint = args[0]
		case v.Receipt != "":
			return fmt.Errorf("verify %.80q: it is a file, and --receipt names another; give the folder of checkpoints", args[0])
		default:
			v.Receipt = args[0]
		}
		v.Change = func(to *spillway.Config) {
			for name, copy := range again {
				if fs.Changed(name) {
					copy(to, &c)
				}
			}
			to.Warn = func(text string) { fmt.Fprintln(cmd.ErrOrStderr(), "warning:", cli.Flagged(text)) }
		}
		return verify(cmd.Context(), v, cmd.OutOrStdout())
	}
	return cmd
}

// usage returns the help text of a flag that verify shares with train.
func usage(name, trains string) string {
	switch name {
	case "init":
		return "present `PATH` of the run's --init"
	case "model", "data", "tokenizer", "template":
		return "present `PATH` of the run's --" + name + " (default: the run's path)"
	case "ranks":
		return "ranks that run the steps again; a number other than the run's needs a run with --reproducible"
	case "zero":
		return "ZeRO stage: 0, 1, 2 or 3"
	}
	return trains
}

// parseSegments reads --segments.
func parseSegments(text string) (func([]receipts.Segment) []receipts.Segment, error) {
	if strings.EqualFold(text, "all") {
		return nil, nil
	}
	if n, err := strconv.Atoi(text); err == nil {
		if n < 1 {
			return nil, fmt.Errorf("--segments %d: at least 1 is needed", n)
		}
		return func(can []receipts.Segment) []receipts.Segment { return drawSegments(n, can) }, nil
	}
	var want [][2]int
	for part := range strings.SplitSeq(text, ",") {
		a, b, ok := strings.Cut(part, "-")
		from, err := strconv.Atoi(a)
		to, berr := strconv.Atoi(b)
		if !ok || errors.Join(err, berr) != nil || from < 0 || to < from {
			return nil, fmt.Errorf("--segments %.80q: want all, a number of segments, or steps as in 100-200", text)
		}
		want = append(want, [2]int{from, to})
	}
	return func(can []receipts.Segment) (list []receipts.Segment) {
		for _, s := range can {
			if slices.ContainsFunc(want, func(w [2]int) bool { return w[0] <= s.To && min(s.From+1, s.To) <= w[1] }) {
				list = append(list, s)
			}
		}
		return list
	}, nil
}

// drawSegments draws n segments at random. A segment without steps, which only compares the states
// of a checkpoint, is drawn only if there are no others.
func drawSegments(n int, can []receipts.Segment) (list []receipts.Segment) {
	steps := slices.DeleteFunc(slices.Clone(can), func(s receipts.Segment) bool { return s.Steps() == 0 })
	if len(steps) > 0 {
		can = steps
	}
	drawn := rand.Perm(len(can))[:min(n, len(can))]
	slices.Sort(drawn)
	for _, i := range drawn {
		list = append(list, can[i])
	}
	return list
}

// verify prints each segment and the result.
func verify(ctx context.Context, v spillway.Verification, w io.Writer) error {
	v.Tell = func(s receipts.Segment) { fmt.Fprintln(w, segmentText(s)) }
	got, err := spillway.VerifyReceipt(ctx, v)
	if got == nil || got.Segments == nil || errors.Is(err, config.ErrRefused) {
		return err
	}
	if got.Cut != "" {
		fmt.Fprintf(w, "%s: %s\n", cli.OnOneLine(got.Receipt), got.Cut)
	}
	fmt.Fprintf(w, "chain: %s of %s, %s, written by Spillway %s\nhead: SHA-256 %s\n", english.Plural(got.Lines, "line", ""),
		cli.OnOneLine(got.Receipt), stepsText(got.From, got.To), cli.OnOneLine(got.Spillway), got.Head)
	if got.Steps == 0 {
		fmt.Fprintln(w, "no steps were run again: the receipt holds no finished interval of steps, only the run's first values")
		return err
	}
	fmt.Fprintf(w, "run again and equal: %d of %d steps (%.1f %%)\n", got.Checked, got.Steps, 100*float64(got.Checked)/float64(got.Steps))
	return err
}

// stepsText formats the steps after from, up to to.
func stepsText(from, to int) string {
	switch to - from {
	case 0:
		return "no steps"
	case 1:
		return fmt.Sprintf("step %d", to)
	}
	return fmt.Sprintf("steps %d to %d", from+1, to)
}

// segmentText formats a segment and its result in one line.
func segmentText(s receipts.Segment) string {
	what := stepsText(s.From, s.To)
	start := cmp.Or(s.Start, "the run's first values")
	if s.Steps() == 0 {
		what = "the states of " + start
	} else if s.Missing == "" {
		what += ", from " + start
	}
	switch {
	case s.Missing != "":
		return what + ": not run again: " + cli.Flagged(s.Missing)
	case !s.Chosen:
		return what + ": not chosen"
	case s.Found != nil:
		return what + ": differs: " + cli.Flagged(s.Found.String())
	}
	return what + ": equal"
}
