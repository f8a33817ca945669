package train

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/internal/outputs"
)

// refuseOverwriting refuses an output that is an input of the run, a file of its
// checkpoints or another output, before anything is touched.
func (c *Config) refuseOverwriting() error {
	if err := refuseForeign(c.Metrics); err != nil {
		return err
	}
	out := []outputs.Path{{Flag: "metrics", Path: c.Metrics}, {Flag: "trace", Path: c.Trace}}
	in := []outputs.Path{{Flag: "data", Path: c.Data}, {Flag: "eval-data", Path: c.EvalData}, {Flag: "tokenizer", Path: c.Tokenizer}}
	in = slices.Concat(in, outputs.ModelFiles("model", c.Model), outputs.ModelFiles("init", c.Init))
	if c.Checkpoint == "" {
		return outputs.Check(out, in)
	}
	entries, err := checkpoint.Scan(c.Checkpoint)
	if err != nil {
		return fmt.Errorf("--checkpoint: %w", err)
	}
	for _, e := range entries {
		in = append(in, outputs.Path{Flag: "checkpoint", Path: e.Folder})
	}
	var own []outputs.Path
	for _, name := range checkpoint.OwnFiles() {
		own = append(own, outputs.Path{Flag: "checkpoint", Path: filepath.Join(c.Checkpoint, name)})
	}
	return cmp.Or(outputs.Check(out, in), outputs.Check(append(own, out...), nil))
}
