package train

import (
	"context"
	"encoding/binary"
	"math"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
)

// corruption is a device on which operations with the label write a NaN into element elem of the
// operand-th touched range (inputs first, then outputs). It affects launches first to last, counted
// from 1.
type corruption struct {
	device.Context
	label         string
	operand, elem int
	first, last   int64
	launches      *atomic.Int64
}

func (c *corruption) NewStream(id graph.StreamID) (device.Stream, error) {
	s, err := c.Context.NewStream(id)
	return &corruptStream{s, c}, err
}

// Poison forwards to the wrapped context.
func (c *corruption) Poison(label string, p device.Ptr) (device.Kernel, error) {
	return c.Context.(device.Poisoner).Poison(label, p)
}

type corruptStream struct {
	device.Stream
	c *corruption
}

func (s *corruptStream) Launch(k device.Kernel) error {
	if k.Label() == s.c.label {
		if n := s.c.launches.Add(1); n >= s.c.first && n <= s.c.last {
			return s.Stream.Launch(&corruptKernel{k.(cpu.Kernel), s.c})
		}
	}
	return s.Stream.Launch(k)
}

type corruptKernel struct {
	cpu.Kernel
	c *corruption
}

func (k *corruptKernel) Run() error {
	if err := k.Kernel.Run(); err != nil {
		return err
	}
	b, err := cpu.Bytes(k.Touches()[k.c.operand])
	if err != nil {
		return err
	}
	binary.LittleEndian.PutUint32(b[4*k.c.elem:], nan)
	return nil
}

// corrupt makes one rank of a run compute a NaN.
func corrupt(c *request, rank int, at *corruption) {
	c.wrapDevice = func(r int, ctx device.Context) device.Context {
		if r != rank {
			return ctx
		}
		at.Context, at.launches = ctx, new(atomic.Int64)
		return at
	}
}

// nan is the bit pattern of a NaN as f32, and of the upper half of one as f64.
const nan = 0x7ff80000

const always = math.MaxInt64

// diverges runs c, which must diverge, and returns the error.
func diverges(t *testing.T, c request) *Diverged {
	t.Helper()
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	err = tr.Run(context.Background(), nil)
	var d *Diverged
	require.ErrorAs(t, err, &d)
	t.Log(err)
	if !d.Update {
		require.Equal(t, d.Step-1, tr.Done())
	}
	return d
}

// TestDivergenceIsNamed trains with a learning rate that makes the next forward pass overflow. The
// error must name the first non-finite tensor, at every stage and placement.
func TestDivergenceIsNamed(t *testing.T) {
	t.Parallel()
	for name, shape := range map[string]func(*request){
		"one rank":            func(*request) {},
		"stage 0":             func(c *request) { c.Ranks, c.Zero = 2, 0 },
		"stage 1, accum":      func(c *request) { c.Ranks, c.Zero, c.Accum = 2, 1, 3 },
		"stage 2, recompute":  func(c *request) { c.Ranks, c.Zero, c.Recompute = 3, 2, "full" },
		"stage 3":             func(c *request) { c.Ranks, c.Zero = 3, 3 },
		"replicas":            func(c *request) { c.Ranks, c.ShardSize = 4, 2 },
		"all on host, clip":   func(c *request) { c.Ranks, c.Clip, c.Offload = 2, 1, "optimizer=host,parameters=host,gradients=host" },
		"disk, no lookahead":  func(c *request) { c.Ranks, c.Prefetch, c.Offload, c.Disk = 2, 0, "optimizer=disk", t.TempDir() },
		"beside the backward": func(c *request) { c.Ranks, c.Accum, c.Offload = 2, 2, "optimizer=host" },
		"skipping, ten times": func(c *request) { c.Ranks, c.OnNonFinite = 2, "skip" },
		"skipping, offloaded": func(c *request) { c.Ranks, c.OnNonFinite, c.Offload = 2, "skip", "optimizer=host" },
	} {
		t.Run(name, func(t *testing.T) {
			c := tiny("gpt2")
			c.LR = 1e30
			shape(&c)
			d := diverges(t, c)
			require.Equal(t, "forward value", d.What)
			require.Equal(t, `"h.0.attn.c_attn"`, d.Tensor)
			require.Contains(t, d.Operation, "/h.0.attn.c_attn")
			require.Zero(t, d.Rank)
			if c.OnNonFinite == "skip" {
				require.Equal(t, 11, d.Step, "step 1 is finite, ten are not")
				require.Equal(t, 10, d.Skipped)
			} else {
				require.Equal(t, 2, d.Step)
			}
		})
	}
}

func TestTheFirstNonFiniteTensor(t *testing.T) {
	t.Parallel()
	for name, at := range map[string]struct {
		corruption
		what, tensor string
	}{
		"forward value": {corruption{label: "h.1.mlp.c_fc", operand: 3, elem: 5}, "forward value", `"h.1.mlp.act"`},
		"loss":          {corruption{label: "head", operand: 4}, "loss", `"loss"`},
		"gradient":      {corruption{label: "h.1.attn.c_attn/dw", operand: 2, elem: 7}, "gradient", `"h.1.attn.c_attn.weight.grad"`},
		"parameter":     {corruption{label: "h.1/adamw", operand: 3, elem: 257}, "parameter", `"h.1.ln_1.bias"`},
	} {
		for _, zero := range []int{0, 3} {
			t.Run(name, func(t *testing.T) {
				c := tiny("gpt2")
				c.Ranks, c.Zero = 2, zero
				injected := at.corruption
				injected.first, injected.last = 3, always // all three steps except the first two
				if name == "loss" {
					injected.elem = 1 // the upper half of an f64
				}
				rank := 1
				if name == "parameter" {
					rank = 0
				}
				corrupt(&c, rank, &injected)
				d := diverges(t, c)
				require.Equal(t, at.what, d.What)
				require.Equal(t, at.tensor, d.Tensor)
				require.Contains(t, d.Operation, injected.label)
				switch {
				case name == "parameter": // found in the step after the update
					require.Equal(t, 4, d.Step)
					require.Zero(t, d.Rank)
				default:
					require.Equal(t, 3, d.Step)
					require.Equal(t, 1, d.Rank)
				}
			})
		}
	}
}

// TestDivergenceBesideUpdates checks offloaded updates that run during the backward pass. They
// finish before the norm is known, but the error must still name the gradient.
func TestDivergenceBesideUpdates(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Offload = 2, "optimizer=host"
	at := corruption{label: "h.1.attn.c_attn/dw", operand: 2, elem: 7, first: 3, last: always}
	corrupt(&c, 1, &at)
	d := diverges(t, c)
	require.True(t, d.Overwritten)
	require.Equal(t, "gradient of parameter", d.What)
	require.Equal(t, `"h.1.attn.c_attn.weight"`, d.Tensor)
	require.Equal(t, 3, d.Step)
}

// TestADivergenceThatDoesNotComeAgain checks that a NaN that is absent when the step is computed
// again is reported as a possible machine failure.
func TestADivergenceThatDoesNotComeAgain(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	at := corruption{label: "h.1.mlp.c_fc", operand: 3, first: 2, last: 2}
	corrupt(&c, 0, &at)
	d := diverges(t, c)
	require.Equal(t, -1, d.Rank)
	require.ErrorContains(t, d, "the machine may have failed")
}

// TestSkippedSteps checks that a skipped step changes no parameter on any rank, at every placement.
// The steps after it must give the bits of a run without the skipped step.
func TestSkippedSteps(t *testing.T) {
	t.Parallel()
	shas := map[string]bool{}
	for name, shape := range map[string]func(*request){
		"stage 0":             func(c *request) { c.Zero = 0 },
		"stage 1":             func(c *request) { c.Zero = 1 },
		"stage 3":             func(c *request) { c.Zero = 3 },
		"on host":             func(c *request) { c.Offload = "optimizer=host" },
		"on disk, by itself":  func(c *request) { c.Offload, c.Disk, c.Prefetch = "optimizer=disk", t.TempDir(), 0 },
		"all of it, on host":  func(c *request) { c.Offload = "optimizer=host,parameters=host,gradients=host,activations=host" },
		"a part on the host":  func(c *request) { c.Offload = "optimizer=host:50%" },
		"recomputed, clipped": func(c *request) { c.Recompute, c.Clip = "full", 1e9 },
	} {
		t.Run(name, func(t *testing.T) {
			c := tiny("gpt2")
			c.Ranks, c.Steps, c.OnNonFinite = 2, 5, "skip"
			shape(&c)
			at := corruption{label: "h.1.attn.c_attn/dw", operand: 2, elem: 7, first: 3, last: 3}
			corrupt(&c, 1, &at)
			tr, err := c.start(context.Background())
			require.NoError(t, err)
			defer func() { require.NoError(t, tr.Close()) }()
			before := ""
			require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
				require.Equal(t, r.Step == 3, r.Skipped, "step %d", r.Step)
				require.True(t, isFinite(float64(r.Loss)), "the loss came before")
				require.Equal(t, r.Step != 3, isFinite(r.GradNorm))
				sum, err := tr.ParamsSHA256()
				require.Equal(t, r.Step == 3, sum == before, "step %d", r.Step)
				before = sum
				return err
			}))
			shas[before] = true
		})
	}
	require.Len(t, shas, 1)

	c := tiny("gpt2")
	c.Ranks, c.Steps = 2, 5
	whole := runOf(t, c)
	c.OnNonFinite = "skip"
	require.Equal(t, whole.sha, runOf(t, c).sha, "where nothing is skipped, skip changes nothing")
}

// TestSkippedStepsAreNotSaved checks that no checkpoint is written while steps are skipped. It
// would hold the same states as the one before.
func TestSkippedStepsAreNotSaved(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Zero, c.Steps, c.Batch, c.Seq = 1, 0, 40, 1, 8
	c.Checkpoint, c.SaveEvery, c.Keep = scratch(t), 1, 2
	c.LR, c.OnNonFinite = 1e30, "skip"
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	err = tr.Run(context.Background(), nil)
	var diverged *Diverged
	require.ErrorAs(t, err, &diverged)
	require.NoError(t, tr.Close())
	list, err := checkpoint.List(c.Checkpoint)
	require.NoError(t, err)
	require.Len(t, list, 1, "the states before the first skipped step: %v", list)
}
