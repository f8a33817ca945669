package train

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

// meshes lists pairs of replicas × shards.
var meshes = [][2]int{{2, 2}, {2, 3}, {3, 2}, {1, 4}, {4, 1}}

func onMesh(mesh [2]int) request {
	c := tiny("gpt2")
	c.Ranks, c.ShardSize, c.Steps, c.Clip, c.Batch = mesh[0]*mesh[1], mesh[1], 3, 0.5, 1
	return c
}

// runMesh is runOf with a tolerance for the bytes sent. Over three replicas, a rank sends a third of
// a shard, which may not be an integer number of bytes.
func runMesh(t testing.TB, c request) outcome {
	t.Helper()
	tr, err := c.start(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	var o outcome
	require.NoError(t, tr.Run(t.Context(), func(r StepResult) error {
		o.losses = append(o.losses, r.Loss)
		for sp := range graph.NumSpaces {
			require.Equal(t, r.Planned[sp], r.Peak[sp], "touched %s peak = plan", sp)
		}
		planned := tr.Plan().CommBytes * int64(c.Ranks)
		units := int64(len(tr.Plan().Program.Units))
		require.InDelta(t, planned, r.CommBytes, float64(4*units*int64(c.Ranks)), "planned and sent bytes, but for a byte a collective and rank")
		return nil
	}))
	o.sha, err = tr.ParamsSHA256()
	require.NoError(t, err)
	return o
}

// TestStagesGiveTheSameBitsOnAMesh checks on a mesh of two axes that all stages give the same bits.
// With accumulation, stages 0 and 1 agree, and stages 2 and 3. Reproducible is refused on such a
// mesh.
func TestStagesGiveTheSameBitsOnAMesh(t *testing.T) {
	t.Parallel()
	for i, mesh := range meshes {
		t.Run(fmt.Sprintf("%d×%d", mesh[0], mesh[1]), func(t *testing.T) {
			c := onMesh(mesh)
			c.Steps = 2
			var want outcome
			for zero := range 4 {
				c.Zero, c.Prefetch = zero, zero%2
				got := runMesh(t, c)
				if zero == 0 {
					want = got
				}
				require.Equal(t, want, got, "stage %d", zero)
			}
			for _, accum := range inTurn(i, []int{2, 3}) {
				c.Accum = accum
				var plain [4]outcome
				for zero := range 4 {
					c.Zero = zero
					plain[zero] = runMesh(t, c)
				}
				require.Equal(t, plain[0], plain[1], "accumulation %d, stages 0 and 1", accum)
				require.Equal(t, plain[2], plain[3], "accumulation %d, stages 2 and 3", accum)
			}
			if c.ShardSize < c.Ranks {
				c.Reproducible = true
				_, err := c.planned().Plan(t.Context())
				require.ErrorContains(t, err, fmt.Sprintf("Config.Reproducible with Config.ShardSize %d of %d ranks", c.ShardSize, c.Ranks))
			}
		})
	}
}

// TestMeshSumsInItsOwnTree compares the mesh with one axis. The bits are equal if the shard groups
// are subtrees of the summation tree. Otherwise the losses differ by rounding only.
func TestMeshSumsInItsOwnTree(t *testing.T) {
	t.Parallel()
	for _, mesh := range meshes {
		c := onMesh(mesh)
		got := runMesh(t, c)
		c.ShardSize = 0
		want := runMesh(t, c)
		if mesh[1]&(mesh[1]-1) == 0 { // groups of a power of two are subtrees of every larger tree
			require.Equal(t, want, got, "%v", mesh)
			continue
		}
		require.Equal(t, want.losses[0], got.losses[0], "%v: the first loss has no gradient in it", mesh)
		require.NotEqual(t, want.sha, got.sha, "%v: another order of addition", mesh)
		for s := range want.losses {
			require.InEpsilon(t, want.losses[s], got.losses[s], 1e-5, "%v, step %d", mesh, s+1)
		}
	}
}

// TestOptimizersOnAMesh checks optimizers that need norms per parameter. They must sum over the
// shard axis only, because replicas hold the same shard.
func TestOptimizersOnAMesh(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"lamb", "larc", "novograd", "muon"} {
		c := onMesh([2]int{2, 2})
		c.Optimizer = name
		c.ShardSize = 0
		want := runMesh(t, c)
		c.ShardSize = 2
		for zero := range 4 {
			c.Zero = zero
			require.Equal(t, want, runMesh(t, c), "%s, stage %d", name, zero)
		}
	}
}

// TestCheckpointAcrossMeshes resumes a checkpoint of one mesh on another mesh and stage; the bits
// must be those of one run.
func TestCheckpointAcrossMeshes(t *testing.T) {
	t.Parallel()
	whole := onMesh([2]int{2, 2})
	whole.Steps, whole.Zero = 4, 1
	want := runMesh(t, whole)
	c := whole
	c.Checkpoint, c.Steps, c.Zero = t.TempDir(), 2, 3
	first := runMesh(t, c)
	require.Equal(t, want.losses[:2], first.losses)
	c.Resume, c.Steps, c.ShardSize, c.Zero = true, 4, 1, 2
	rest := runMesh(t, c)
	require.Equal(t, want.losses[2:], rest.losses)
	require.Equal(t, want.sha, rest.sha)
}

func TestShardSizeIsValidated(t *testing.T) {
	t.Parallel()
	c := onMesh([2]int{2, 3})
	c.ShardSize = 4
	_, err := c.planned().Plan(t.Context())
	require.ErrorContains(t, err, "Config.ShardSize 4 with Config.Ranks 6: states are sharded over 6 ranks, and 4 does not divide 6; use 3 or 6")
	for _, p := range []string{"bf16", "fp16"} {
		c.ShardSize, c.Precision = 3, p
		_, err = c.planned().Plan(t.Context())
		require.NoError(t, err)
	}
}
