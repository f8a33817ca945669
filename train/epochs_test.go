package train

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/train/saving"
)

// TestResumeDrawsEpochsByTheCheckpointsVersion checks that a checkpoint records the version of the
// epoch order. A run resumed from one without a version reads the samples of the old order and
// records that version. An unknown version is refused.
func TestResumeDrawsEpochsByTheCheckpointsVersion(t *testing.T) {
	t.Parallel()
	c := keeping(t, 2)
	c.Order = "shuffled"
	ended(t, c)
	newest := newestOf(t, c.Checkpoint)
	var was saving.Record
	require.NoError(t, json.Unmarshal(newest.Manifest.Run, &was))
	require.Equal(t, 2, was.Epochs)

	started := func(seed int64) *Trainer {
		d := c
		d.Checkpoint, d.Seed = scratch(t), seed
		tr, err := d.start(t.Context())
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, tr.Close()) })
		return tr
	}
	tr, next := started(c.Seed), started(c.Seed+1)
	require.NoError(t, tr.saver.Seek(newest, was))
	s, following := tr.train.sampler, next.train.sampler
	rows := c.Batch * c.Ranks * c.Accum
	orders := func() (epoch1, following0 []int64) {
		require.NoError(t, s.Seek(0, s.Windows()))
		for i := range 40 {
			epoch1 = append(epoch1, s.Start(i/rows, 0, i%rows/c.Batch, i%c.Batch))
			following0 = append(following0, following.Start(i/rows, 0, i%rows/c.Batch, i%c.Batch))
		}
		return epoch1, following0
	}
	a, b := orders()
	require.NotEqual(t, b, a, "epoch 1 is not epoch 0 of the next seed")

	was.Epochs = 0
	require.NoError(t, tr.saver.Seek(newest, was))
	a, b = orders()
	require.Equal(t, b, a, "to the older versions it was")
	text, err := tr.saver.Record()
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &was))
	require.Equal(t, 1, was.Epochs)

	was.Epochs = 3
	require.ErrorContains(t, tr.saver.Seek(newest, was), "resume from step-00000002: ")
}
