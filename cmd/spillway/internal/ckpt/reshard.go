package ckpt

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/internal/filesys"
)

// mostReshard bounds `ckpt reshard --ranks`: each rank has a file.
const mostReshard = 1 << 16

func ckptReshardCommand() *cobra.Command {
	ranks := 0
	cmd := &cobra.Command{
		Use:     "reshard DIR --ranks N",
		Short:   "Rewrite a checkpoint's files for another number of ranks",
		Long:    "Rewrite the files of a checkpoint, or of the newest complete one in a folder, as N ranks would have written them: the same states, byte for byte. Loading never needs this: any number of ranks loads any checkpoint. It gives files of even size to tools and disks. The old files are removed once the new ones are complete.",
		Example: "  spillway ckpt reshard run1 --ranks 8",
		Args:    oneFolder("reshard"),
	}
	cmd.Flags().IntVar(&ranks, "ranks", 0, "number of ranks to write files for")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !cmd.Flags().Changed("ranks") {
			return errors.New("ckpt reshard: --ranks N is missing: how many ranks' files to write")
		}
		if ranks < 1 || ranks > mostReshard {
			return fmt.Errorf("ckpt reshard: --ranks %d: 1 to %d are possible", ranks, mostReshard)
		}
		return reshard(cmd.Context(), args[0], ranks, cmd.OutOrStdout(), cmd.ErrOrStderr())
	}
	return cmd
}

func reshard(ctx context.Context, dir string, ranks int, stdout, stderr io.Writer) error {
	if err := isFolder(dir); err != nil {
		return err
	}
	folder, passed, err := checkpoint.Reshard(ctx, filesys.System, dir, ranks)
	for _, p := range passed {
		fmt.Fprintln(stderr, "warning:", p)
	}
	if busy, ok := errors.AsType[*checkpoint.Busy](err); ok {
		return fmt.Errorf("ckpt reshard: %w", busy)
	}
	if err != nil {
		return err
	}
	fmt.Fprintf(stdout, "%s: %s\n", folder, english.Plural(ranks, "rank file", ""))
	return nil
}
