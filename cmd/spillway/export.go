package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/train/saving"
)

func ckptExportCommand() *cobra.Command {
	var to string
	shard := int64(checkpoint.ShardBytes)
	cmd := &cobra.Command{
		Use:     "export DIR --to DIR",
		Short:   "Write a checkpoint's model as a Hugging Face folder",
		Long:    "Write the model of a checkpoint, or of the newest whole one in a folder, as a Hugging Face folder: config.json, model.safetensors (above --max-shard-size several files and their index), fp32, and the tokenizer's files where the run knew them. The files are verified; the folder appears complete or not at all. train --export DIR does so at the run's end.",
		Example: "  spillway ckpt export run1 --to model",
		Args:    oneFolder("export"),
	}
	cmd.Flags().StringVar(&to, "to", "", "the `DIR` to write, which must be new or empty")
	cmd.Flags().Var(sizeFlag{&shard}, "max-shard-size", "largest file of weights")
	cmd.Flags().Lookup("max-shard-size").DefValue = "5GB" // checkpoint.ShardBytes
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if to == "" {
			return errors.New("ckpt export: --to is missing: the folder to write")
		}
		if err := isFolder(args[0]); err != nil {
			return err
		}
		if err := exportable("to", to, args[0]); err != nil {
			return err
		}
		folder, err := exportModel(cmd.Context(), args[0], to, shard, cmd.ErrOrStderr())
		if err != nil {
			return err
		}
		fmt.Fprintf(cmd.OutOrStdout(), "%s: the model of %s\n", to, folder)
		return nil
	}
	return cmd
}

// exportable refuses a folder to write a model of from's to, which a flag names, that is
// not new or empty, or lies in from.
func exportable(flag, to, from string) error {
	if inside, err := within(to, from); err != nil || inside {
		return cmp.Or(err, fmt.Errorf("--%s %.80q lies in %.80q; give a folder elsewhere", flag, to, from))
	}
	return empty(flag, to)
}

// empty refuses a folder that has something in it.
func empty(flag, to string) error {
	if left, err := os.ReadDir(to); err == nil && len(left) > 0 {
		return fmt.Errorf("--%s %.80q is not empty (%.80q is there); give a new folder", flag, to, left[0].Name())
	} else if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("--%s: %w", flag, err)
	}
	return nil
}

// exportModel writes the model of a checkpoint, or of the newest whole one of a folder,
// and returns which that was.
func exportModel(ctx context.Context, from, to string, shard int64, stderr io.Writer) (folder string, err error) {
	c, passed, err := checkpoint.Take(ctx, filesys.System, from, model.ConfigFile, safetensors.FileName)
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(filepath.Join(from, model.ConfigFile)); c == nil && err == nil {
		return "", fmt.Errorf("ckpt export: %.80q is a model's folder already; a checkpoint or a checkpoint folder is needed", from)
	}
	if c == nil {
		return "", fmt.Errorf("ckpt: %.80q is no checkpoint and holds none", from)
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	for _, p := range passed {
		fmt.Fprintln(stderr, "warning:", p)
	}
	names := []string{model.ConfigFile, safetensors.FileName}
	for _, f := range c.Manifest.Files {
		if slices.Contains(saving.ModelFiles(), f.Name) && f.Name != model.ConfigFile {
			names = append(names, f.Name)
		}
	}
	return c.Folder, c.Export(ctx, to, shard, names...)
}

// refuseExport refuses train's --export before there is a run: without checkpoints, in
// their folder, or where the run writes something else.
func (l *later) refuseExport(c *spillway.Config) error {
	switch {
	case l.export == "":
		return nil
	case c.Checkpoint == "":
		return fmt.Errorf("--export %.80q without --checkpoint: what is exported is the run's last checkpoint; give --checkpoint DIR", l.export)
	}
	for _, other := range []struct{ flag, path string }{{"checkpoint", c.Checkpoint}, {"metrics", c.Metrics}, {"trace", c.Trace}, {"tensorboard", c.TensorBoard}, {"disk", c.Disk}} {
		if other.path != "" && (below(other.path, l.export) || other.flag == "checkpoint" && below(l.export, other.path)) {
			return fmt.Errorf("--export %.80q and --%s %.80q: one lies in the other; give a folder elsewhere", l.export, other.flag, other.path)
		}
	}
	for _, in := range []struct{ flag, path string }{{"data", c.Data}, {"eval-data", c.EvalData}} {
		if in.path != "" && below(l.export, in.path) {
			return fmt.Errorf("--export %.80q would lie in %.80q, which --%s reads; give a folder elsewhere", l.export, in.path, in.flag)
		}
	}
	if _, err := os.Stat(c.Checkpoint); err != nil {
		return empty("export", l.export)
	}
	return exportable("export", l.export, c.Checkpoint)
}

// roomToExport sees, in the process that exports, that a folder can be made where
// --export's will be.
func (l *later) roomToExport() error {
	if l.export == "" {
		return nil
	}
	abs, err := filepath.Abs(l.export)
	if err != nil {
		return fmt.Errorf("--export: %w", err)
	}
	beside := filepath.Dir(abs)
	if err := os.MkdirAll(beside, 0o777); err != nil {
		return fmt.Errorf("--export: %w", err)
	}
	probe, err := os.MkdirTemp(beside, ".spillway-")
	if err == nil {
		err = os.Remove(probe)
	}
	if err != nil {
		return fmt.Errorf("--export: %w", err)
	}
	return nil
}

// below tells whether a path is dir or below it, by their names.
func below(path, dir string) bool {
	a, err := filepath.Abs(path)
	if err != nil {
		return false
	}
	b, err := filepath.Abs(dir)
	if err != nil {
		return false
	}
	rel, err := filepath.Rel(b, a)
	return err == nil && filepath.IsLocal(rel)
}

// exportLast writes the model of a run that has come to its end, from its last
// checkpoint.
func (l *later) exportLast(ctx context.Context, c *spillway.Config, stdout, stderr io.Writer) error {
	if l.export == "" {
		return nil
	}
	if _, err := exportModel(ctx, c.Checkpoint, l.export, checkpoint.ShardBytes, stderr); err != nil {
		hint := "the checkpoint is whole: spillway ckpt export writes it later"
		if ctx.Err() != nil {
			return &interrupted{"interrupted after training, while the model was exported; " + hint}
		}
		return fault(fmt.Errorf("--export: %w (%s)", err, hint))
	}
	fmt.Fprintf(stdout, "Hugging Face model: %s\n", onOneLine(l.export))
	return nil
}
