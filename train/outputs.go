package train

import (
	"cmp"
	"slices"

	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/internal/outputs"
	"github.com/spillway-ml/spillway/train/receipts"
)

// refuseOverwriting refuses an output path that is an input of the run, a file of its
// checkpoints or another output, before any file is touched.
func refuseOverwriting(c *request) error {
	if err := refuseForeign("Config.Metrics", c.Metrics, metricsHeads...); err != nil {
		return err
	}
	if err := receipts.RefuseOld(&c.Config, c.opener()); err != nil {
		return err
	}
	out := []outputs.Path{{Name: "Config.Metrics", Path: c.Metrics}, {Name: "Config.Trace", Path: c.Trace}, {Name: "Config.Receipt", Path: c.Receipt}}
	in := []outputs.Path{{Name: "Config.Data", Path: c.Data}, {Name: "Config.EvalData", Path: c.EvalData}, {Name: "Config.Tokenizer", Path: c.Tokenizer}}
	in = slices.Concat(in, outputs.ModelFiles("Config.Model", c.Model), outputs.ModelFiles("Config.Init", c.Init))
	stored := outputs.Folders(outputs.Path{Name: "Config.Model", Path: c.Model}, outputs.Path{Name: "Config.Init", Path: c.Init})
	stored = append(stored, outputs.Path{Name: "Config.Checkpoint", Path: c.Checkpoint})
	all := append(out, outputs.Path{Name: "Config.TensorBoard", Path: c.TensorBoard}, outputs.Path{Name: "Config.Disk", Path: c.Disk})
	return cmp.Or(outputs.Check(out, in), outputs.CheckStored(all, stored), refuseForeign("Config.Trace", c.Trace, exec.TraceHead))
}
