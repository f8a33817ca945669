package offload_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/fsdp"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/layouts"
	"github.com/spillway-ml/spillway/memplan"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/zero"
)

// sharded returns the step of a small GPT-2 at the given stage and number of ranks.
func sharded(t *testing.T, layers, ranks int, o fsdp.Options) *graph.Program {
	t.Helper()
	p, err := model.Build(model.Config{Family: model.GPT2, Layers: layers, Width: 64, Heads: 2, Vocab: 96, Positions: 64, TiedHead: true}, model.Train, 2, 64)
	require.NoError(t, err)
	p, err = graph.Differentiate(p)
	require.NoError(t, err)
	p.Sections[0].Become(graph.SectionTrain)
	p = graph.Fuse(p)
	p.Mesh = []graph.Axis{{Name: "shard", Size: ranks}}
	o.Optimizer = zero.Optimizer{Name: "adamw", Beta1: 0.9, Beta2: 0.95}
	o.Accum = max(o.Accum, 1)
	p, err = fsdp.Shard(p, o)
	require.NoError(t, err)
	p, err = fsdp.Accumulate(p)
	require.NoError(t, err)
	p, err = fsdp.Reduce(p, o.Prefetch)
	require.NoError(t, err)
	p, err = fsdp.Unshard(p, o.Prefetch, o.Int8Gather)
	require.NoError(t, err)
	return p
}

func rewrite(t *testing.T, p *graph.Program, o offload.Options) *graph.Program {
	t.Helper()
	before := graph.Format(p)
	q, err := offload.Rewrite(p, o)
	require.NoError(t, err)
	require.Equal(t, before, graph.Format(p), "the input is left alone")
	q, err = graph.Schedule(q)
	require.NoError(t, err)
	require.NoError(t, graph.Verify(q))
	l, err := layouts.Assign(q, memplan.Options{})
	require.NoError(t, err)
	require.NoError(t, layouts.Check(q, l))
	return q
}

// listing lists a phase's operations of the named units: those on streams other than compute, the
// updates, and the sums of squares.
func listing(p *graph.Program, phase string, units ...string) string {
	var lines []string
	for _, ph := range p.Section("step").Phases {
		if ph.Name != phase {
			continue
		}
		for i := range ph.Ops {
			op := &ph.Ops[i]
			if op.Unit < 0 || op.Stream == graph.Compute && op.Kind != "adamw" && op.Kind != graph.SqSum {
				continue
			}
			for _, u := range units {
				if p.Units[op.Unit].Name == u {
					lines = append(lines, fmt.Sprintf("%s @%v", op.Name, op.Stream))
				}
			}
		}
	}
	return strings.Join(lines, "\n")
}

func golden(text string) string {
	var lines []string
	for _, l := range strings.Split(strings.TrimSpace(text), "\n") {
		lines = append(lines, strings.TrimSpace(l))
	}
	return strings.Join(lines, "\n")
}

// Without clipping, a unit's update runs after its reduced gradient and after the last use of its
// parameters. The gradient shard and the value shard go to the host, the update runs there, and the
// value returns. The norm is computed on the device.
func TestOptimizerOnHost(t *testing.T) {
	q := rewrite(t, sharded(t, 1, 2, fsdp.Options{Stage: 3}), offload.Options{Optimizer: graph.Host})
	require.Equal(t, golden(`
		h.0/all_gather.2 @comm
		shard/h.0/park @copy-out
		h.0/all_gather.6 @comm
		h.0/reduce_scatter @comm
		h.0/grad_sq @compute
		reduced/h.0/park @copy-out
		h.0/adamw @host
		shard/h.0/fetch @copy-in`), listing(q, "only", "h.0"))
	require.Empty(t, listing(q, "update", "h.0"))
}

// With the optimizer on disk, the moments are loaded to host memory before the update and stored
// after it.
func TestOptimizerOnDisk(t *testing.T) {
	q := rewrite(t, sharded(t, 1, 2, fsdp.Options{Stage: 2}), offload.Options{Optimizer: graph.Disk, Parameters: graph.Host, Gradients: graph.Host})
	require.Equal(t, golden(`
		value/h.0/fetch @copy-in
		value/h.0/fetch.2 @copy-in
		h.0/reduce_scatter @comm
		h.0/grad_sq @compute
		reduced/h.0/park @copy-out
		exp_avg/h.0/load @disk-in
		exp_avg_sq/h.0/load @disk-in
		h.0/adamw @host
		exp_avg/h.0/store @disk-out
		exp_avg_sq/h.0/store @disk-out
		value/h.0/fetch.3 @copy-in
		h.0/all_gather @comm
		value/h.0/park @copy-out`), listing(q, "only", "h.0"))
}

// A parameter shard on the host is fetched before each all-gather. On one rank the unit itself is
// fetched before each use.
func TestParametersOnHost(t *testing.T) {
	q := rewrite(t, sharded(t, 1, 2, fsdp.Options{Stage: 3}), offload.Options{Parameters: graph.Host})
	require.Equal(t, golden(`
		shard/h.0/fetch @copy-in
		h.0/all_gather.2 @comm
		shard/h.0/fetch.2 @copy-in
		h.0/all_gather.6 @comm
		h.0/reduce_scatter @comm`), listing(q, "only", "h.0"))
	q = rewrite(t, sharded(t, 1, 1, fsdp.Options{Stage: 3}), offload.Options{Parameters: graph.Host})
	require.Equal(t, golden(`
		value/h.0/fetch @copy-in
		value/h.0/fetch.2 @copy-in`), listing(q, "only", "h.0"))
}

// Accumulated gradients on the host are fetched in every micro-step but the first.
func TestGradientsOnHost(t *testing.T) {
	q := rewrite(t, sharded(t, 1, 2, fsdp.Options{Stage: 2, Accum: 2}), offload.Options{Gradients: graph.Host})
	require.Equal(t, golden(`
		h.0/reduce_scatter @comm
		reduced/h.0/park @copy-out`), listing(q, "first", "h.0"))
	require.Equal(t, golden(`
		reduced/h.0/fetch @copy-in
		h.0/reduce_scatter @comm
		reduced/h.0/park @copy-out`), listing(q, "last", "h.0"))
}

// Activations are parked in the order of the forward and fetched in reverse order. Each byte is
// copied once in each direction.
func TestActivationsAreParkedAndFetchedInReverse(t *testing.T) {
	for _, space := range []graph.Space{graph.Host, graph.Disk} {
		q := rewrite(t, sharded(t, 6, 1, fsdp.Options{}), offload.Options{Activations: space, Ahead: 1})
		var out, in []string
		var outBytes, inBytes int64
		for _, op := range q.Section("step").Phases[0].Ops {
			what, verb, _ := strings.Cut(op.Name, "/")
			switch {
			case op.Kind != graph.Copy || !strings.HasPrefix(what, "h."):
			case verb == "park":
				out = append(out, q.Units[op.Unit].Name)
				outBytes += q.Buf(op.Out[0].Buf).Bytes()
			case verb == "fetch":
				in = append([]string{q.Units[op.Unit].Name}, in...)
				inBytes += q.Buf(op.Out[0].Buf).Bytes()
			}
		}
		require.NotEmpty(t, out)
		require.Equal(t, out, in)
		require.Equal(t, outBytes, inBytes)
		require.Equal(t, "h.0", out[0])
	}
}

// With activations on the host, the device's peak grows with the layers only by the small
// statistics.
func TestParkedActivationsFreeTheDevice(t *testing.T) {
	peak := func(layers int, o offload.Options) (device, host int64) {
		l, err := layouts.Assign(rewrite(t, sharded(t, layers, 1, fsdp.Options{}), o), memplan.Options{})
		require.NoError(t, err)
		return l.Spaces[graph.Device].ClassPeak[graph.Activations], l.Spaces[graph.Host].ClassPeak[graph.Activations]
	}
	d6, _ := peak(6, offload.Options{})
	d12, _ := peak(12, offload.Options{})
	p6, h6 := peak(6, offload.Options{Activations: graph.Host, Ahead: 1})
	p12, h12 := peak(12, offload.Options{Activations: graph.Host, Ahead: 1})
	stats := int64(6 * 6 * 2 * 64 * 4) // mean, rstd (2 norms), log-sum-exp (2 heads) of 128 tokens
	require.LessOrEqual(t, p12-p6, stats)
	require.Less(t, p12, d6)
	require.Equal(t, d12-d6-(p12-p6), h12-h6, "what no longer grows on the device grows on the host")
}

// DeviceShare keeps the states of complete units on the device, up to that share of all states.
func TestDeviceShare(t *testing.T) {
	p := sharded(t, 4, 1, fsdp.Options{})
	total := int64(0)
	for _, u := range p.Units {
		total += 2 * 4 * u.FlatLen
	}
	last := int64(-1)
	for _, share := range []float64{0, 0.3, 0.6, 1} {
		q := rewrite(t, p, offload.Options{Optimizer: graph.Host, DeviceShare: share})
		on := int64(0)
		for _, u := range q.Units {
			for _, s := range u.States {
				if q.Buf(s.Buf).Space == graph.Device {
					on += q.Buf(s.Buf).Bytes()
				}
			}
		}
		require.LessOrEqual(t, float64(on), share*float64(total))
		require.Greater(t, on, last)
		last = on
	}
	require.Equal(t, total, last)
}

// With states on disk, the chunk size bounds the host memory, not the unit's size.
func TestChunksBoundHostMemory(t *testing.T) {
	for _, chunk := range []int64{4096, 8192} {
		o := offload.Options{Optimizer: graph.Disk, Parameters: graph.Disk, Gradients: graph.Disk, Ahead: 1, Chunk: chunk}
		l, err := layouts.Assign(rewrite(t, sharded(t, 2, 1, fsdp.Options{}), o), memplan.Options{})
		require.NoError(t, err)
		// Two chunks of value, gradient and two moments, and two bounce buffers in each direction
		// between disk and device.
		require.LessOrEqual(t, l.Spaces[graph.Host].ClassPeak[graph.Communication], (2*4+2*2)*4*chunk)
	}
}

func TestParse(t *testing.T) {
	o, err := offload.Parse("Optimizer=DISK, parameters=host,activations=host")
	require.NoError(t, err)
	require.Equal(t, offload.Options{Optimizer: graph.Disk, Parameters: graph.Host, Activations: graph.Host}, o)
	require.True(t, o.Active())
	for _, bad := range []string{"x", "optimizer=", "optimizer=device", "weights=host", ","} {
		_, err := offload.Parse(bad)
		require.Error(t, err, bad)
	}
	_, err = offload.Rewrite(&graph.Program{}, offload.Options{Ahead: -1})
	require.ErrorContains(t, err, "-1 stretches ahead")
	_, err = offload.Rewrite(&graph.Program{}, offload.Options{DeviceShare: 2})
	require.ErrorContains(t, err, "share of 2")
	_, err = offload.Rewrite(&graph.Program{}, offload.Options{Chunk: 5})
	require.ErrorContains(t, err, "chunks of 5")
}
