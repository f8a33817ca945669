package train

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/internal/outputs"
	"github.com/spillway-ml/spillway/train/receipts"
)

// refuseOverwriting refuses an output path that is an input of the run, a file of its
// checkpoints or another output, before any file is touched.
func refuseOverwriting(c *request) error {
	if err := refuseForeign(c.Metrics); err != nil {
		return err
	}
	if err := receipts.RefuseOld(&c.Config, c.opener()); err != nil {
		return err
	}
	out := []outputs.Path{{Name: "Config.Metrics", Path: c.Metrics}, {Name: "Config.Trace", Path: c.Trace}, {Name: "Config.Receipt", Path: c.Receipt}}
	in := []outputs.Path{{Name: "Config.Data", Path: c.Data}, {Name: "Config.EvalData", Path: c.EvalData}, {Name: "Config.Tokenizer", Path: c.Tokenizer}}
	in = slices.Concat(in, outputs.ModelFiles("Config.Model", c.Model), outputs.ModelFiles("Config.Init", c.Init))
	if c.Checkpoint == "" {
		return outputs.Check(out, in)
	}
	d, err := checkpoint.OpenDir(c.opener(), c.Checkpoint)
	var entries []checkpoint.Entry
	if err == nil {
		entries, err = d.Scan()
		err = errors.Join(err, d.Close())
	}
	if err != nil {
		return fmt.Errorf("Config.Checkpoint %s: %w", c.Checkpoint, err)
	}
	for _, e := range entries {
		in = append(in, outputs.Path{Name: "Config.Checkpoint", Path: e.Folder})
	}
	var own []outputs.Path
	for _, name := range checkpoint.OwnFiles() {
		own = append(own, outputs.Path{Name: "Config.Checkpoint", Path: filepath.Join(c.Checkpoint, name)})
	}
	return cmp.Or(outputs.Check(out, in), outputs.Check(append(own, out...), nil))
}
