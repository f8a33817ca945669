package train

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/config"
)

// TestTheFolderOfAJobIsRemoved removes the checkpoint folder of a job of several processes. As with
// one process, later saves must succeed in a new folder.
func TestTheFolderOfAJobIsRemoved(t *testing.T) {
	for _, how := range []string{config.AsyncOff, config.AsyncOn} {
		c := tiny("gpt2")
		c.Batch, c.Seq, c.Steps, c.SaveEvery, c.AsyncSave = 1, 16, 4, 1, how
		c.Checkpoint = filepath.Join(scratch(t), "ck")
		c.Warn = func(text string) { t.Error(how, text) }
		overProcesses(t, c, 2, 2, func(t testing.TB, c request) (o outcome) {
			tr, err := c.start(context.Background())
			require.NoError(t, err)
			require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
				if r.Step != 3 {
					return nil
				}
				tr.saver.Idle()
				return os.RemoveAll(c.Checkpoint)
			}))
			require.NoError(t, tr.Close())
			return o
		})
		list, err := checkpoint.List(c.Checkpoint)
		require.NoError(t, err)
		require.Len(t, list, 2, "%s: steps 3 and 4", how)
	}
}
