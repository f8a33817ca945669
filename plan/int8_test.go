package plan

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/zero"
)

// With int8, ranks send one code per element and four bytes per block of 256. That is 260/512 of
// bf16's bytes in every gather of the parameters, and in every reduction at stages 1 to 3. At stage
// 0 a reduction is an exchange of codes and a gather of bf16: (260/512 + 1)/2. Units too small for
// shards are all-reduced at every stage and not counted here.
func TestInt8BytesBetweenRanks(t *testing.T) {
	fwd := forwardOf(t, smallGPT, 2, 16, false)
	bytes := func(c Config) (gathers, sums, others int64) {
		p, err := Build(fwd, c)
		require.NoError(t, err)
		require.Equal(t, CommBytes(p.Program), p.CommBytes)
		for _, ph := range p.Program.Section("step").Phases {
			for i := range ph.Ops {
				if u := ph.Ops[i].Unit; u >= 0 && tooSmall(&p.Program.Units[u], 4) {
					continue
				}
				switch n := OpCommBytes(p.Program, &ph.Ops[i]); {
				case strings.Contains(ph.Ops[i].Name, "grad_all_gather"), ph.Ops[i].Kind == graph.ReduceScatter, ph.Ops[i].Kind == graph.AllReduce, ph.Ops[i].Kind == graph.AllToAll:
					sums += n
				case ph.Ops[i].Kind == graph.AllGather:
					gathers += n
				default:
					others += n
				}
			}
		}
		return gathers, sums, others
	}
	for stage := range zero.Stage(4) {
		c := mixed(4, stage)
		gathers, sums, none := bytes(c)
		require.Zero(t, none)
		c.Int8Gather, c.Int8Reduce = true, true
		g, s, none := bytes(c)
		require.Zero(t, none)
		require.Equal(t, gathers*260/512, g, "stage %d", stage)
		if stage == 0 {
			require.Equal(t, sums*(260+512)/1024, s)
			require.LessOrEqual(t, float64(s), 0.76*float64(sums))
		} else {
			require.Equal(t, sums*260/512, s, "stage %d", stage)
			require.LessOrEqual(t, float64(s), 0.52*float64(sums))
		}
	}
}

// An activation saved in int8 needs one byte per element and four per row. In GPT-2's layer these
// are both norms' outputs, the pre-activation and the activation; in Llama's also the gate.
func TestInt8ActivationsBytes(t *testing.T) {
	gpt, llama := smallGPT, smallLlama
	gpt.Width, llama.Width, llama.FFN = 192, 192, 256
	for _, c := range []struct {
		fwd  Forward
		want []string
	}{
		{forwardOf(t, gpt, 2, 16, false), []string{"h.0.ln_1.int8", "h.0.ln_2.int8", "h.0.mlp.c_fc.int8", "h.0.mlp.act.int8"}},
		{forwardOf(t, llama, 2, 16, false), []string{"model.layers.0.input_layernorm.int8", "model.layers.0.post_attention_layernorm.int8", "model.layers.0.mlp.gate_proj.int8", "model.layers.0.mlp.up_proj.int8", "model.layers.0.mlp.swiglu.int8"}},
	} {
		conf := mixed(1, 0)
		conf.Int8 = precision.Int8{Activations: true}
		p, err := Build(c.fwd, conf)
		require.NoError(t, err)
		byName := map[string]*graph.Buffer{}
		var names []string
		for i := range p.Program.Buffers {
			b := &p.Program.Buffers[i]
			byName[b.Name] = b
			if strings.HasSuffix(b.Name, ".int8") && strings.Contains(b.Name, ".0.") {
				names = append(names, b.Name)
				full := byName[strings.TrimSuffix(b.Name, ".int8")]
				rows := full.Elems() / full.Shape[len(full.Shape)-1]
				require.Equal(t, full.Elems()+4*rows, b.Bytes(), b.Name)
				require.LessOrEqual(t, float64(b.Bytes()), 0.52*float64(full.Bytes()), b.Name)
			}
		}
		require.ElementsMatch(t, c.want, names)
	}
}

// CheckSaved refuses a norm's gradient that reads an activation saved in int8, because the
// statistics belong to the unquantized value.
func TestStaleStatisticsAreRefused(t *testing.T) {
	conf := mixed(1, 0)
	conf.Int8 = precision.Int8{Activations: true}
	p, err := Build(forwardOf(t, smallGPT, 2, 16, false), conf)
	require.NoError(t, err)
	require.NoError(t, precision.CheckSaved(p.Program))
	ops := p.Program.Section("step").Phases[0].Ops
	read := graph.NoBuf
	for i := range ops {
		switch op := &ops[i]; {
		case op.Kind == graph.Dequantize && op.Out[0].Mode == graph.Write:
			read = op.Out[0].Buf
		case op.Kind == graph.LayerNormGrad && read != graph.NoBuf:
			op.In[1] = read
			require.ErrorContains(t, precision.CheckSaved(p.Program), "which was saved in int8")
			return
		}
	}
	require.Fail(t, "no norm's gradient behind an activation that was saved in int8")
}

// GPT-2 124M at 4 × 256 tokens on one rank: with bf16, activations need at most 0.55 of fp32's
// bytes. With 8-bit moments too, all device memory is at most 0.75 of fp32's.
func TestHalfMemoryOfGPT2(t *testing.T) {
	fwd := forwardOf(t, preset(t, "gpt2"), 4, 256, false)
	plan := func(change func(c *Config)) memplan.SpaceUse {
		c := mixed(1, 0)
		change(&c)
		p, err := Build(fwd, c)
		require.NoError(t, err)
		return p.Layout.Spaces[graph.Device]
	}
	full := plan(func(c *Config) { c.Precision = precision.FP32 })
	half := plan(func(c *Config) {})
	eight := plan(func(c *Config) { c.Optimizer.Int8 = true })
	require.LessOrEqual(t, float64(half.ClassPeak[graph.Activations]), 0.55*float64(full.ClassPeak[graph.Activations]))
	require.LessOrEqual(t, float64(eight.Peak), 0.75*float64(full.Peak))
}
