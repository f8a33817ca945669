package train

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
)

// frozenRun returns a run on a few rows of the text, so that epochs are short. The embeddings and
// the first block are frozen.
func frozenRun(t *testing.T, model string, rows, seq int) request {
	c := tiny(model)
	c.Seq = seq
	text, err := os.ReadFile(c.Data)
	require.NoError(t, err)
	c.Data = filepath.Join(t.TempDir(), "tokens.bin")
	require.NoError(t, os.WriteFile(c.Data, text[:2*(rows*c.Seq+1)], 0o644))
	c.Freeze = []string{"*wte.weight", "*wpe.weight", "*h.0.*", "*embed_tokens*", "*layers.0.*"}
	if model == "gpt2" {
		c.Freeze = c.Freeze[:3]
	} else {
		c.Freeze = c.Freeze[3:]
	}
	return c
}

type cachedOutcome struct {
	losses []float32
	sha    string
	cached []bool
	read   int64
}

func cachedRun(t *testing.T, c request) (o cachedOutcome) {
	t.Helper()
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
		o.losses, o.cached = append(o.losses, r.Loss), append(o.cached, r.Cached)
		o.read += r.DiskRead
		for sp := range graph.NumSpaces {
			// The peak may be in the form of the step that uses the cache.
			if r.Step == c.Steps {
				require.Equal(t, r.Planned[sp], r.Peak[sp], "touched %s peak = plan", sp)
			}
		}
		return nil
	}))
	o.sha, err = tr.ParamsSHA256()
	require.NoError(t, err)
	return o
}

// TestFrozenCacheGivesTheSameBits checks that cached outputs of frozen layers give the bits of
// their forward pass. It varies stage, tier, order, recomputation, offload and accumulation. Steps
// from the second epoch on must use the cache.
func TestFrozenCacheGivesTheSameBits(t *testing.T) {
	t.Parallel()
	for i, model := range []string{"gpt2", "llama-untied"} {
		for _, ranks := range []int{1, 3} {
			for _, accum := range []int{1, 2} {
				c := frozenRun(t, model, 2*ranks*accum*2, 40) // an epoch is two steps
				c.Ranks, c.Accum, c.Steps, c.Reproducible, c.Zero = ranks, accum, 5, true, 0
				c.Order = []string{"sequential", "shuffled"}[(ranks+accum+i)%2]
				c.Clip = float64(accum - 1) // with clipping, updates wait for the next step, with or without the cache
				want := cachedRun(t, c)
				require.NotContains(t, want.cached, true)
				for _, zero := range long.Or(stagePairs[(i+ranks/2+accum)%2], []int{0, 1, 2, 3}) { // half of the stages by default
					for _, j := range inTurn(zero/2+accum+i, []int{0, 1}) {
						tier := []graph.Space{graph.Host, graph.Disk}[j]
						c.Zero, c.FrozenCache, c.Disk = zero, config.FrozenCache{Tier: tier, Bytes: 1 << 20}, scratch(t)
						c.Recompute = []string{"none", "full"}[(zero+j)%2]
						c.Offload = []string{"", "activations=host", "optimizer=disk,parameters=host"}[(zero+2*j)%3]
						got := cachedRun(t, c)
						what := fmt.Sprintf("%s, %d ranks, accum %d, stage %d, %s, %s, %s", model, ranks, accum, zero, tier, c.Recompute, c.Offload)
						require.Equal(t, want.losses, got.losses, what)
						require.Equal(t, want.sha, got.sha, what)
						require.Equal(t, []bool{false, false, true, true, true}, got.cached, what)
						if tier == graph.Disk {
							require.Positive(t, got.read, what)
						}
					}
				}
			}
		}
	}
}

// TestFrozenCacheInHalfPrecision checks that in 16 bits the frozen layers' outputs are cached in 16
// bits, with the bits of their forward pass.
func TestFrozenCacheInHalfPrecision(t *testing.T) {
	t.Parallel()
	for zero, precision := range map[int]string{0: "bf16", 3: "bf16", 2: "fp16"} {
		c := frozenRun(t, "gpt2", 8, 40)
		c.Ranks, c.Steps, c.Precision, c.Zero = 2, 5, precision, zero
		want := cachedRun(t, c)
		c.FrozenCache, c.Disk = config.FrozenCache{Tier: []graph.Space{graph.Host, graph.Disk}[zero%2], Bytes: 1 << 20}, scratch(t)
		p, err := c.planned().Plan(t.Context())
		require.NoError(t, err)
		require.Equal(t, p.Program.Buf(p.Program.Port(graph.PortPrefix)).DType.String(), map[string]string{"bf16": "bf16", "fp16": "f16"}[precision])
		got := cachedRun(t, c)
		require.Contains(t, got.cached, true)
		require.Equal(t, want.losses, got.losses, "%s, stage %d", precision, zero)
		require.Equal(t, want.sha, got.sha, "%s, stage %d", precision, zero)
	}
}

// TestFrozenCacheWithoutRoomForAll checks a cache too small for all rows. The first rows stay in
// it, the others are computed, and a warning reports this.
func TestFrozenCacheWithoutRoomForAll(t *testing.T) {
	t.Parallel()
	c := frozenRun(t, "gpt2", 8, 40)
	c.Steps = 8
	want := cachedRun(t, c)
	row := int64(c.Seq) * 4 * 48
	p, err := c.planned().Plan(t.Context())
	require.NoError(t, err)
	for i := range p.Program.Params {
		if p.Program.Params[i].Name == "wpe.weight" {
			row = int64(c.Seq) * 4 * p.Program.Params[i].Shape[1]
		}
	}
	var told []string
	c.Warn = func(s string) { told = append(told, s) }
	c.FrozenCache = config.FrozenCache{Tier: graph.Host, Bytes: 5 * row}
	got := cachedRun(t, c)
	require.Equal(t, want.losses, got.losses)
	require.Equal(t, want.sha, got.sha)
	require.Equal(t, []bool{false, false, false, false, true, true, false, false}, got.cached)
	require.Contains(t, strings.Join(told, "\n"), "Config.FrozenCache holds 5 of the data's 8 rows")
}

func TestFrozenCacheRefusals(t *testing.T) {
	t.Parallel()

	for want, change := range map[string]func(*request){
		"Config.FrozenCache needs Config.Freeze": func(c *request) { c.Freeze = nil },
		"with Config.Dropout 0.1: dropout has":   func(c *request) { c.Dropout = 0.1 },
		"is trained":                             func(c *request) { c.Freeze = []string{"*h.1.*"} },
		"needs Config.Disk":                      func(c *request) { c.FrozenCache.Tier = graph.Disk },
		"cannot hold one row":                    func(c *request) { c.FrozenCache.Bytes = 100 },
		"outside its arena":                      func(c *request) { c.HostMemory = 1 << 20 },
	} {
		c := frozenRun(t, "gpt2", 8, 40)
		c.FrozenCache = config.FrozenCache{Tier: graph.Host, Bytes: 1 << 20}
		change(&c)
		tr, err := c.start(context.Background())
		if !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("got %v, want %q", err, want)
		}
		if tr != nil {
			require.NoError(t, tr.Close())
		}
	}
}

// TestFrozenCacheOverACap checks a plan that exceeds a cap only because of the cache. The error must
// name the cache and the size that fits.
func TestFrozenCacheOverACap(t *testing.T) {
	t.Parallel()
	for _, tier := range []graph.Space{graph.Host, graph.Disk} {
		c := frozenRun(t, "gpt2", 8, 40)
		c.Disk, c.FrozenCache = scratch(t), config.FrozenCache{Tier: tier, Bytes: 3 << 20}
		p, err := c.planned().Plan(t.Context())
		require.NoError(t, err)
		limit := p.Layout.Spaces[tier].Peak + p.Config.Outside[tier] - 1<<20
		if tier == graph.Host {
			c.HostMemory = limit
		} else {
			c.DiskMemory = limit
		}
		want := fmt.Sprintf("; it fits with Config.FrozenCache %s:2MiB or less instead of 3.00 MiB", tier)
		_, err = c.planned().Plan(t.Context())
		var refused *plan.DoesNotFit
		require.ErrorAs(t, err, &refused)
		require.ErrorContains(t, err, want)
		require.Equal(t, tier == graph.Host, strings.Contains(err.Error(), "the peak is at "), "disk has no arena: %v", err)

		_, err = c.planned().Fit(t.Context(), planner.Fixed{}, 0, briefly(1))
		require.ErrorAs(t, err, &refused)
		if tier == graph.Disk {
			require.ErrorContains(t, err, want)
			require.ErrorContains(t, err, "(bound by Config.FrozenCache of 3.00 MiB)")
		} else {
			require.ErrorContains(t, err, "; it fits with Config.FrozenCache host:")
		}

		c.FrozenCache.Bytes = 2 << 20
		_, err = c.planned().Plan(t.Context())
		require.NoError(t, err, "as it says")
		c.FrozenCache.Bytes = 3 << 20
		if tier == graph.Disk {
			c.DiskMemory = 100 // less than a row
			_, err = c.planned().Plan(t.Context())
			require.ErrorContains(t, err, "; it fits with no Config.FrozenCache (it is 3.00 MiB)")
		}
	}
}

type flipped struct{ store.RawFile }

func (f flipped) ReadAt(p []byte, off int64) (int, error) {
	n, err := f.RawFile.ReadAt(p, off)
	if n > 0 {
		p[0] ^= 1
	}
	return n, err
}

// TestFrozenCacheNoticesDamage checks that a damaged row of the cache ends the run before it is
// used.
func TestFrozenCacheNoticesDamage(t *testing.T) {
	t.Parallel()
	c := frozenRun(t, "gpt2", 4, 64) // a row is a multiple of the block size, so writing it reads nothing
	c.Steps, c.Disk, c.FrozenCache = 4, scratch(t), config.FrozenCache{Tier: graph.Disk, Bytes: 1 << 20}
	c.wrapDisk = func(rank int, f store.RawFile) store.RawFile { return flipped{f} }
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	err = tr.Run(context.Background(), nil)
	require.ErrorContains(t, err, "cache of the frozen layers")
	require.ErrorContains(t, err, "checksum")
	require.Equal(t, 2, tr.Done(), "the first epoch does not read")
	require.NoError(t, tr.Close())
}

func TestParseFrozenCache(t *testing.T) {
	t.Parallel()
	size := func(s string) (n int64, err error) {
		if _, err = fmt.Sscanf(s, "%d", &n); err == io.EOF {
			err = fmt.Errorf("no size")
		}
		return n, err
	}
	got, err := config.ParseFrozenCache("Disk:12", size)
	require.NoError(t, err)
	require.Equal(t, config.FrozenCache{Tier: graph.Disk, Bytes: 12}, got)
	for _, bad := range []string{"gpu:12", "host", "host:", "host:x", "host:0"} {
		_, err := config.ParseFrozenCache(bad, size)
		require.ErrorContains(t, err, bad)
	}
}

// TestFrozenRowsInMemory checks that DiskCache keeps cached rows of frozen layers in memory. Bits
// must not change, and more memory must reduce the bytes read.
func TestFrozenRowsInMemory(t *testing.T) {
	t.Parallel()
	c := frozenRun(t, "gpt2", 12, 40)
	c.Ranks, c.Batch, c.Steps, c.Order = 2, 1, 60, "shuffled"
	want := cachedRun(t, c)
	c.FrozenCache, c.Disk = config.FrozenCache{Tier: graph.Disk, Bytes: 1 << 20}, scratch(t)
	last := cachedRun(t, c)
	require.Equal(t, want.sha, last.sha)
	row := last.read / int64(2*54) // bytes: the first of 10 epochs of 6 steps reads none
	require.Positive(t, row)
	require.Zero(t, row%4)
	for _, rows := range []int64{6, 12} {
		c.Disk, c.DiskCache = scratch(t), rows*row // for each of two ranks; half of it is used
		got := cachedRun(t, c)
		require.Equal(t, want.losses, got.losses)
		require.Equal(t, want.sha, got.sha)
		require.Less(t, got.read, last.read, "%d rows in memory", rows)
		last = got
	}
}
