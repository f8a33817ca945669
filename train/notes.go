package train

import (
	"fmt"
	"os"
	"slices"

	"github.com/dustin/go-humanize"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/data"
)

// fileNotes returns notes about Config fields that have no effect on the given kinds of data
// files.
func fileNotes(c *config.Config) (notes []string) {
	if c.Own.Data != nil {
		return nil
	}
	paths := []string{c.Data, c.EvalData}
	if c.TextField != "" && !slices.ContainsFunc(paths, func(path string) bool { return isFolder(path) || data.HoldsRecords(path) }) {
		notes = append(notes, fmt.Sprintf("Config.TextField %.80q changes nothing: no data are JSON lines (*.jsonl) or Parquet", c.TextField))
	}
	if c.DataGlob != "" && !slices.ContainsFunc(paths, isFolder) {
		notes = append(notes, fmt.Sprintf("Config.DataGlob %.80q changes nothing: a file that is named itself is read whatever "+
			"its name is; patterns are for folders", c.DataGlob))
	}
	return notes
}

func isFolder(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.IsDir()
}

// adapterNotes returns a note that says which adapters are trained, or none.
func (t *Trainer) adapterNotes() []string {
	if !t.cfg.LoRA.Active() {
		return nil
	}
	matrices, trained, all := 0, int64(0), int64(0)
	for i := range t.plan.Program.Tensors() {
		prm := &t.plan.Program.Params[i]
		all += prm.Elems()
		if !prm.Frozen {
			trained += prm.Elems()
			matrices++
		}
	}
	return []string{fmt.Sprintf("lora: r %d, alpha %g, %d matrices, %s trained parameters of %s",
		t.cfg.LoRA.Rank, t.cfg.LoRA.Alpha, matrices/2, humanize.Comma(trained), humanize.Comma(all))}
}
