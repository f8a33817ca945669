package train

import (
	"fmt"
	"os"
	"slices"

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
		notes = append(notes, fmt.Sprintf("Config.TextField %v changes nothing: no data are JSON lines (*.jsonl) or Parquet", c.TextField))
	}
	if c.DataGlob != "" && !slices.ContainsFunc(paths, isFolder) {
		notes = append(notes, fmt.Sprintf("Config.DataGlob %v changes nothing: a file that is named itself is read whatever its name is; patterns are for folders", c.DataGlob))
	}
	return notes
}

func isFolder(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.IsDir()
}
