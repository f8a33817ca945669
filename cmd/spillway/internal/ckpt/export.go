package ckpt

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/train/saving"
)

// ExportCommand returns the command ckpt export.
func ExportCommand() *cobra.Command {
	var to, format string
	var merge bool
	shard := int64(checkpoint.ShardBytes)
	cmd := &cobra.Command{
		Use:     "export DIR --to DIR",
		Short:   "Write a checkpoint's model as a Hugging Face folder",
		Long:    "Write the model of a checkpoint, or of the newest complete one in a folder, as a Hugging Face folder: config.json, model.safetensors in fp32 (above --max-shard-size several files and their index), and the tokenizer's files if the run had them. The model's values are verified, and the folder appears only when it is complete. train --export DIR does the same at the end of a run. For a checkpoint with adapters (train --lora), --merge writes the model with their products added to its weights; --format peft writes the adapters alone.",
		Example: "  spillway ckpt export run1 --to model",
		Args:    oneFolder("export"),
	}
	cmd.Flags().StringVar(&to, "to", "", "`DIR` to write, which must be new or empty")
	cmd.Flags().BoolVar(&merge, "merge", false, "add the adapters' products to the weights")
	cmd.Flags().StringVar(&format, "format", saving.FormatHF, "hf (the folder of a model) or peft (the adapters alone: adapter_config.json and adapter_model.safetensors)")
	cmd.Flags().Var(cli.Size(&shard), "max-shard-size", "maximum size of a file of weights")
	cmd.Flags().Lookup("max-shard-size").DefValue = "5GB" // checkpoint.ShardBytes
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if to == "" {
			return errors.New("ckpt export: --to is missing: the folder to write")
		}
		if err := isFolder(args[0]); err != nil {
			return err
		}
		if err := options.Exportable("to", to, args[0]); err != nil {
			return err
		}
		folder, err := exportModel(cmd.Context(), args[0], to, cmd.ErrOrStderr(), func(c *checkpoint.Checkpoint) (checkpoint.Exporting, error) {
			return saving.Exported(c, format, merge, shard)
		})
		if errors.Is(err, saving.ErrAdapters) {
			return fmt.Errorf("ckpt export: %.80q %w; give --merge to add them to its weights, "+
				"or --format %s for the adapters alone", args[0], saving.ErrAdapters, saving.FormatPEFT)
		}
		if err != nil {
			return err
		}
		fmt.Fprintf(cmd.OutOrStdout(), "%s: the model of %s\n", to, folder)
		return nil
	}
	return cmd
}

// exportModel writes the model of a checkpoint, or of the newest complete one of a folder, and
// returns that checkpoint's folder.
func exportModel(ctx context.Context, from, to string, stderr io.Writer, what func(*checkpoint.Checkpoint) (checkpoint.Exporting, error)) (folder string, err error) {
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
	x, err := what(c)
	if err != nil {
		return "", fmt.Errorf("ckpt export: %w", err)
	}
	return c.Folder, c.Export(ctx, to, x)
}

// ExportLast writes the model of a completed run, from its last checkpoint in from, to the folder
// of --export; with "" it does nothing.
func ExportLast(ctx context.Context, from, to string, stdout, stderr io.Writer) error {
	if to == "" {
		return nil
	}
	if _, err := exportModel(ctx, from, to, stderr, saving.ExportedModel); err != nil {
		hint := "the checkpoint is whole: spillway ckpt export writes it later"
		if ctx.Err() != nil {
			return cli.Interrupted("interrupted after training, while the model was exported; " + hint)
		}
		return cli.Fault(fmt.Errorf("--export: %w (%s)", err, hint))
	}
	fmt.Fprintf(stdout, "Hugging Face model: %s\n", cli.OnOneLine(to))
	return nil
}
