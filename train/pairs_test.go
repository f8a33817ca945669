package train

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
)

// TestFieldsThatNeedAnother checks fields that have an effect only with another field. Without that
// other field, a value that is not the default must give an error or a note that names the field.
func TestFieldsThatNeedAnother(t *testing.T) {
	base := func() config.Config {
		c := config.Default()
		c.Model, c.Data = "gpt2", filepath.Join("..", "testdata", "text.txt")
		return c
	}
	c := base()
	require.NoError(t, c.Validate())
	require.Empty(t, c.IdleNotes())
	text, lines := c.Data, filepath.Join(t.TempDir(), "a.jsonl.gz")
	for _, p := range []struct {
		alone, beside func(c *config.Config)
		said          string
	}{
		{func(c *config.Config) { c.EvalEvery = 2 }, func(c *config.Config) { c.EvalData = text }, "Config.EvalEvery needs Config.EvalData"},
		{func(c *config.Config) { c.EvalSteps = 2 }, func(c *config.Config) { c.EvalData = text }, "Config.EvalSteps 2 changes nothing: without Config.EvalData"},
		{func(c *config.Config) { c.Keep = 2 }, func(c *config.Config) { c.Checkpoint = "ck" }, "Config.Keep 2 needs Config.Checkpoint"},
		{func(c *config.Config) { c.SaveEvery = 2 }, func(c *config.Config) { c.Checkpoint = "ck" }, "Config.SaveEvery needs Config.Checkpoint"},
		{func(c *config.Config) { c.Resume = true }, func(c *config.Config) { c.Checkpoint = "ck" }, "Config.Resume needs Config.Checkpoint"},
		{func(c *config.Config) { c.AcceptChanges = true }, func(c *config.Config) { c.Checkpoint, c.Resume = "ck", true }, "Config.AcceptChanges is for Config.Resume"},
		{func(c *config.Config) { c.DiskCache = 1 << 20 }, func(c *config.Config) { c.Disk = "d" }, "Config.DiskCache needs Config.Disk"},
		{func(c *config.Config) { c.MinLR = 1e-5 }, func(c *config.Config) { c.LRSchedule = "Cosine" }, "Config.MinLR 1e-05 with Config.LRSchedule constant"},
		{func(c *config.Config) { c.MinLR, c.LRSchedule = 1e-2, "cosine" }, func(c *config.Config) { c.LR = 1e-2 }, "Config.MinLR 0.01 is above Config.LR"},
		{func(c *config.Config) { c.LRBaseBatch = 64 }, func(c *config.Config) { c.LRScale = "sqrt" }, "Config.LRBaseBatch 64 with Config.LRScale none"},
		{func(c *config.Config) { c.Trust = 0.1 }, func(c *config.Config) { c.Optimizer = "larc" }, "Config.Trust 0.1 changes nothing: it is for Config.Optimizer larc and lars"},
		{func(c *config.Config) { c.AdaptAll = true }, func(c *config.Config) { c.Optimizer = "LAMB" }, "Config.AdaptAll changes nothing: it is for Config.Optimizer lamb, larc and lars"},
		{func(c *config.Config) { c.Beta2, c.Optimizer = 0.9, "sgd" }, func(c *config.Config) { c.Optimizer = "novograd" }, "Config.Beta2 0.9 changes nothing: it is for Config.Optimizer adamw"},
		{func(c *config.Config) { c.Eps, c.Optimizer = 1e-6, "lars" }, func(c *config.Config) { c.Optimizer = "lamb" }, "Config.Eps 1e-06 changes nothing: it is for Config.Optimizer adagrad, adamw"},

		{func(c *config.Config) { c.Warmup = 101 }, func(c *config.Config) { c.Steps = 101 }, "Config.Warmup 101 is more than Config.Steps"},
		{func(c *config.Config) { c.Prefetch, c.Zero = 2, 2 }, func(c *config.Config) { c.Zero = 3 }, "Config.Prefetch 2 changes nothing"},
		{func(c *config.Config) { c.ShardSize, c.Zero, c.Ranks = 2, 0, 4 }, func(c *config.Config) { c.Zero = 1 }, "Config.ShardSize 2 changes nothing"},
		{func(c *config.Config) { c.AccumOrder = "layer" }, func(c *config.Config) { c.Accum = 2 }, "Config.AccumOrder layer changes nothing"},
		{func(c *config.Config) { c.AsyncSave = "off" }, func(c *config.Config) { c.Checkpoint = "ck" }, "Config.AsyncSave off changes nothing"},
		{func(c *config.Config) { c.TextField = "body" }, func(c *config.Config) { c.EvalData = lines }, `Config.TextField "body" changes nothing`},
		{func(c *config.Config) { c.DataGlob = "*.go" }, func(c *config.Config) { c.Data = filepath.Dir(text) }, `Config.DataGlob "*.go" changes nothing`},
		{func(c *config.Config) { c.Nesterov = true }, func(c *config.Config) { c.Optimizer = "larc" }, "Config.Nesterov: optimizer: adamw has no choice of Nesterov's form; use larc, lars, sgd"},
		{func(c *config.Config) { c.Nesterov, c.Optimizer, c.Beta1 = true, "sgd", 0 }, func(c *config.Config) { c.Beta1 = 0.5 }, "Config.Nesterov: optimizer: Nesterov's form needs momentum"},
	} {
		saidOf := func(c *config.Config) string {
			if err := c.Validate(); err != nil {
				require.ErrorIs(t, err, ErrConfig)
				return err.Error()
			}
			return strings.Join(append(c.IdleNotes(), fileNotes(c)...), "\n")
		}
		c := base()
		p.alone(&c)
		require.True(t, strings.HasPrefix(saidOf(&c), p.said), "%s: %s", p.said, saidOf(&c))
		p.beside(&c)
		require.Empty(t, saidOf(&c), p.said)
	}
}
