// Package ckpt implements the command ckpt.
package ckpt

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/outputs"
	"github.com/spillway-ml/spillway/plan"
)

// Command returns the command ckpt, with its verbs below it.
func Command() *cobra.Command {
	cmd := &cobra.Command{Use: "ckpt", Short: "Inspect, verify, export and reshard checkpoints", Args: cli.NoArguments,
		RunE: func(*cobra.Command, []string) error {
			return errors.New("ckpt: name what to do: inspect, verify, export or reshard")
		}}
	cmd.AddCommand(ckptInspectCommand(), ckptVerifyCommand(), ExportCommand(), ckptReshardCommand())
	return cmd
}

// oneFolder checks that exactly one DIR is given.
func oneFolder(verb string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != 1 {
			return fmt.Errorf("ckpt %s: name one checkpoint or checkpoint folder; %d were given", verb, len(args))
		}
		return nil
	}
}

// isFolder returns an error if dir is not a folder.
func isFolder(dir string) error {
	st, err := os.Stat(dir)
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("ckpt: %.80q does not exist; a checkpoint or a checkpoint folder is needed", dir)
	}
	if err != nil {
		return fmt.Errorf("ckpt: %w", err)
	}
	if !st.IsDir() {
		return fmt.Errorf("ckpt: %.80q is not a folder; a checkpoint or a checkpoint folder is needed", dir)
	}
	return nil
}

// eachOf calls do for the checkpoint dir, or for each checkpoint in the folder dir; there must be
// at least one. See checkpoint.Each.
func eachOf(dir string, do func(checkpoint.Entry, *checkpoint.Checkpoint) error) (marks checkpoint.Marks, alone bool, err error) {
	if err := isFolder(dir); err != nil {
		return marks, false, err
	}
	none := true
	marks, alone, err = checkpoint.Each(filesys.System, dir, func(e checkpoint.Entry, c *checkpoint.Checkpoint) error {
		none = false
		return do(e, c)
	})
	if err == nil && none {
		err = fmt.Errorf("ckpt: %.80q is no checkpoint and holds none", dir)
	}
	return marks, alone, err
}

func ckptVerifyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "verify DIR",
		Short:   "Check every byte of a checkpoint, or of all in a folder, against its manifest",
		Long:    "Compare every file of a checkpoint, or of all checkpoints in a folder, with the size and the CRC-32C in its manifest. Status 2 if any is damaged.",
		Example: "  spillway ckpt verify run1",
		Args:    oneFolder("verify"),
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return verifyAll(cmd.Context(), args[0], cmd.OutOrStdout())
	}
	return cmd
}

func verifyAll(ctx context.Context, dir string, stdout io.Writer) error {
	var first error
	marks, alone, err := eachOf(dir, func(e checkpoint.Entry, c *checkpoint.Checkpoint) error {
		err := e.Err
		if c != nil {
			err = c.Verify(ctx)
		}
		if err != nil && ctx.Err() != nil {
			return err
		}
		if err != nil {
			fmt.Fprintf(stdout, "%s: %v\n", e.Name, err)
			first = cmp.Or(first, err)
			return nil
		}
		m := c.Manifest
		fmt.Fprintf(stdout, "%s: whole, step %d, %d files, %s\n", e.Name, m.Step, len(m.Files), plan.Bytes(sizeOf(m)))
		return nil
	})
	if err == nil && !alone && marks.Damaged != nil {
		err = marks.Damaged
		fmt.Fprintf(stdout, "%s: %v\n", dir, err)
	}
	return cmp.Or(first, err)
}

func sizeOf(m checkpoint.Manifest) (n int64) {
	for _, f := range m.Files {
		n += f.Bytes
	}
	return n
}

// Inspected is the description of a checkpoint that `ckpt inspect --json` writes.
type Inspected struct {
	Name      string           `json:"name"`
	Step      int              `json:"step"`
	Bytes     int64            `json:"bytes"`
	Run       string           `json:"run,omitempty"`
	Written   *time.Time       `json:"written,omitempty"`
	Ranks     int              `json:"ranks,omitempty"`
	Confirmed bool             `json:"confirmed"`
	Diverged  bool             `json:"diverged"`
	Damage    string           `json:"damage,omitempty"`
	Record    json.RawMessage  `json:"record,omitempty"`
	States    []inspectedState `json:"states,omitempty"`
	Files     []inspectedFile  `json:"files,omitempty"`
}

type inspectedFile struct {
	Name     string `json:"name"`
	Bytes    int64  `json:"bytes"`
	Tensors  int    `json:"tensors,omitempty"`
	Elements int64  `json:"elements,omitempty"`
}

// inspectedState is one state of a checkpoint, over all its files.
type inspectedState struct {
	Name     string `json:"name"`
	Tensors  int    `json:"tensors"`
	Elements int64  `json:"elements"`
}

func ckptInspectCommand() *cobra.Command {
	var jsonPath string
	cmd := &cobra.Command{
		Use:     "inspect DIR",
		Short:   "Describe a checkpoint, or all in a folder",
		Long:    "Describe a checkpoint, or all in a folder: steps, the run and its settings, files and tensors, and the folder's record of confirmed and diverged checkpoints. Reads manifests and headers; `ckpt verify` reads every byte.",
		Example: "  spillway ckpt inspect run1\n  spillway ckpt inspect run1/step-00001000 --json -",
		Args:    oneFolder("inspect"),
	}
	cmd.Flags().StringVar(&jsonPath, "json", "", "write the result as JSON to `FILE`, - for stdout")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var list []Inspected
		var of []checkpoint.Manifest
		marks, _, err := eachOf(args[0], func(e checkpoint.Entry, c *checkpoint.Checkpoint) error {
			list, of = append(list, inspect(e, c)), append(of, e.Manifest) // a damaged one has an empty manifest
			return nil
		})
		if err != nil {
			return err
		}
		if marks.Damaged != nil {
			fmt.Fprintln(cmd.ErrOrStderr(), "warning:", marks.Damaged)
		}
		for i := range list {
			list[i].Confirmed, list[i].Diverged = marks.Confirmed(of[i]), marks.Diverged(of[i])
		}
		if jsonPath != "" {
			return writeInspected(cmd.OutOrStdout(), jsonPath, args[0], list)
		}
		return printInspected(cmd.OutOrStdout(), list, marks)
	}
	return cmd
}

// inspect describes a checkpoint, without the folder's marks; c is nil if it could not be opened.
func inspect(e checkpoint.Entry, c *checkpoint.Checkpoint) Inspected {
	m := e.Manifest
	v := Inspected{Name: e.Name, Step: e.Step}
	if c == nil {
		v.Damage = e.Err.Error()
		return v
	}
	v.Bytes, v.Run, v.Written, v.Ranks, v.Record = sizeOf(m), m.Owner, m.Written, m.Ranks, m.Run
	for _, name := range m.States() {
		state := inspectedState{Name: name}
		for i := range m.Tensors {
			if slices.Contains(m.Tensors[i].States, name) {
				state.Tensors++
				state.Elements += m.Tensors[i].Elements(name)
			}
		}
		if state.Tensors > 0 {
			v.States = append(v.States, state)
		}
	}
	for _, f := range m.Files {
		file := inspectedFile{Name: f.Name, Bytes: f.Bytes}
		if strings.HasSuffix(f.Name, ".safetensors") {
			r, err := c.Tensors(f)
			if err != nil {
				v.Damage = err.Error()
				continue
			}
			for _, t := range r.Tensors() {
				file.Tensors++
				file.Elements += t.Elements()
			}
			if err := r.Close(); err != nil {
				v.Damage = err.Error()
			}
		}
		v.Files = append(v.Files, file)
	}
	return v
}

func writeInspected(stdout io.Writer, path, dir string, list []Inspected) error {
	out, in := []outputs.Path{{Name: "--json", Path: path}}, []outputs.Path{{Name: "ckpt inspect", Path: dir}}
	if err := cmp.Or(outputs.Check(out, in), outputs.CheckStored(out, in)); err != nil {
		return err
	}
	return cli.WriteJSON(stdout, path, map[string]any{"checkpoints": list})
}

func printInspected(w io.Writer, list []Inspected, marks checkpoint.Marks) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "checkpoint\twritten\tsize\trun\tranks\tstate")
	for _, v := range list {
		written, run := "-", "-"
		if v.Written != nil {
			written = v.Written.Format(time.RFC3339)
		}
		if v.Run != "" {
			run = v.Run[:min(8, len(v.Run))]
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%s\n", v.Name, written, plan.Bytes(v.Bytes), run, v.Ranks, v.state())
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, d := range marks.Divergences {
		fmt.Fprintf(w, "an attempt became non-finite at step %d, from %s\n", d.Step, cmp.Or(d.From, "its start"))
	}
	return printRecord(w, list[len(list)-1])
}

func (v *Inspected) state() string {
	switch {
	case v.Damage != "":
		return v.Damage
	case v.Diverged:
		return "diverged from"
	case v.Confirmed:
		return "confirmed"
	}
	return "not confirmed yet (no update followed it)"
}

// printRecord prints the run, the states and the files of the newest checkpoint.
func printRecord(w io.Writer, v Inspected) error {
	var record struct {
		Optimizer string
		Samples   int64
		Data      struct {
			Tokens int64
			SHA256 string
		}
		Settings map[string]string
	}
	if v.Record == nil {
		return nil
	}
	if err := json.Unmarshal(v.Record, &record); err != nil {
		return fmt.Errorf("ckpt inspect: %s: its run can't be read: %w", v.Name, err)
	}
	fmt.Fprintf(w, "\n%s: optimizer %s", v.Name, record.Optimizer)
	if record.Settings != nil {
		fmt.Fprintf(w, ", %d samples seen of data of %d tokens (SHA-256 %.16s…)", record.Samples, record.Data.Tokens, record.Data.SHA256)
	}
	fmt.Fprintln(w)
	for _, flag := range slices.Sorted(maps.Keys(record.Settings)) {
		if value := record.Settings[flag]; value != "" {
			fmt.Fprintf(w, "  --%s %.80q\n", flag, value)
		}
	}
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	if len(v.States) > 0 {
		fmt.Fprintln(t, "state\ttensors\tvalues")
		for _, s := range v.States {
			fmt.Fprintf(t, "%s\t%d\t%d\n", s.Name, s.Tensors, s.Elements)
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	fmt.Fprintln(t, "file\tsize\ttensors or parts\tvalues")
	for _, f := range v.Files {
		fmt.Fprintf(t, "%s\t%s\t%d\t%d\n", f.Name, plan.Bytes(f.Bytes), f.Tensors, f.Elements)
	}
	return t.Flush()
}
