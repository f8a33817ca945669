package train

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/train/saving"
)

// kindsOf counts the operations of a plan by kind.
func kindsOf(t *testing.T, c request) map[graph.Kind]int {
	t.Helper()
	p, _, err := c.build(t.Context())
	require.NoError(t, err)
	n := map[graph.Kind]int{}
	for _, s := range p.Program.Sections {
		for _, ph := range s.Phases {
			for i := range ph.Ops {
				n[ph.Ops[i].Kind]++
			}
		}
	}
	return n
}

// onGPU returns tiny gpt2 in bf16, planned for a GPU with the named epilogues.
func onGPU(names ...string) request {
	c := tiny("gpt2")
	c.Device, c.Precision, c.Epilogues = "cuda", "bf16", names
	return c
}

func TestEpiloguesAreChosen(t *testing.T) {
	t.Parallel()
	byDefault := kindsOf(t, onGPU())
	require.Positive(t, byDefault[graph.LinearGradAct])
	require.Equal(t, byDefault, kindsOf(t, onGPU("Default")))
	require.Equal(t, byDefault, kindsOf(t, onGPU("DGELU")))

	none := kindsOf(t, onGPU("none"))
	require.Zero(t, none[graph.LinearGradAct])
	require.Equal(t, byDefault[graph.LinearGradAct], none[graph.ActivationGrad]-byDefault[graph.ActivationGrad])
	require.Equal(t, byDefault[graph.LinearGradAct], none[graph.LinearGradX]-byDefault[graph.LinearGradX])

	biases := byDefault[graph.BiasGrad]
	require.Positive(t, biases)
	require.Zero(t, byDefault[graph.LinearGradWB])
	for _, names := range [][]string{{"bgrad"}, {"bgrad", "dgelu"}, {"all"}} {
		n := kindsOf(t, onGPU(names...))
		require.Equal(t, biases, n[graph.LinearGradWB], names)
		require.Equal(t, byDefault[graph.LinearGradW]-biases, n[graph.LinearGradW], names)
		require.Zero(t, n[graph.BiasGrad], names)
		require.Equal(t, len(names) == 1 && names[0] == "bgrad", n[graph.LinearGradAct] == 0, names)
	}

	c := onGPU("none") // has no effect without epilogues
	c.Precision = "fp32"
	n := kindsOf(t, c)
	require.Zero(t, n[graph.LinearGradAct])
	c.Epilogues = nil
	require.Equal(t, n, kindsOf(t, c))
}

func TestEpiloguesAreValidated(t *testing.T) {
	t.Parallel()
	for want, change := range map[string]func(*request){
		`Config.Epilogues "relu": use default, none, all, or some of dgelu, bgrad, gelu`: func(c *request) { c.Epilogues = []string{"relu"} },
		"Config.Epilogues none with other names: default, none and all must be the only": func(c *request) { c.Epilogues = []string{"dgelu", "none"} },
		"dgelu with Config.Device cpu: only a GPU's":                                     func(c *request) { c.Device = "cpu" },
		"all with Config.Device cpu: only a GPU's":                                       func(c *request) { c.Device, c.Epilogues = "cpu", []string{"all"} },
		"dgelu with Config.Precision fp32: only 16-bit":                                  func(c *request) { c.Precision = "fp32" },
		"all with Config.Precision fp32: only 16-bit":                                    func(c *request) { c.Precision, c.Epilogues = "", []string{"all"} },
		"dgelu with Config.Precision fp32: only":                                         func(c *request) { c.Allow = []string{"fp32"} }, // a search might choose fp32
		"dgelu with Config.Int8 matmul: products of int8 have no":                        func(c *request) { c.Int8 = []string{"matmul"} },
	} {
		c := onGPU("dgelu")
		change(&c)
		require.ErrorContains(t, c.Validate(), want)
		require.ErrorIs(t, c.Validate(), ErrConfig)
	}
	for _, names := range []string{"", "default", "none", "None"} { // these request nothing
		c := tiny("gpt2")
		c.Epilogues = strings.FieldsFunc(names, func(r rune) bool { return r == ',' })
		require.NoError(t, c.Validate())
	}
}

// TestEpiloguesAreOnRecord checks that epilogues with other bits than the default are recorded in
// the settings and noted in the plan.
func TestEpiloguesAreOnRecord(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		of   request
		want string
	}{
		{onGPU(), ""}, {onGPU("default"), ""}, {onGPU("dgelu"), ""}, {onGPU("none"), "none"}, {onGPU("BGRAD", "dgelu"), "dgelu,bgrad"}, {onGPU("all"), "dgelu,bgrad,gelu"}, {onGPU("bgrad"), "bgrad"}, {tiny("gpt2"), ""},
	} {
		require.Equal(t, c.want, saving.Settings(&c.of.Config)["epilogues"], c.of.Epilogues)
		f, err := planner.Predict(t.Context(), c.of.Config, cost.CPU(1, 1))
		require.NoError(t, err)
		notes := strings.Join(f.Notes(), "\n")
		require.Equal(t, c.want != "", strings.Contains(notes, "Config.Epilogues "+c.want), notes)
	}
	require.Equal(t, "dgelu", (&planner.Forecast{Config: onGPU().Config}).Epilogues())
	require.Equal(t, "none", (&planner.Forecast{Config: onGPU("none").Config}).Epilogues())
	require.Equal(t, "dgelu,bgrad,gelu", (&planner.Forecast{Config: onGPU("all").Config}).Epilogues())
	cpu := tiny("gpt2")
	require.Empty(t, (&planner.Forecast{Config: cpu.Config}).Epilogues())
	for model, says := range map[string]bool{"gpt2": false, "llama-tied": true} { // SiLU
		c := onGPU("gelu")
		c.Model, c.Init = tiny(model).Model, ""
		f, err := planner.Predict(t.Context(), c.Config, cost.CPU(1, 1))
		require.NoError(t, err)
		require.Equal(t, says, slices.Contains(f.Notes(), "Config.Epilogues gelu: no product of this run has it, and nothing changes by it"), f.Notes())
	}
	was, now := onGPU(), onGPU("none")
	names, lines := saving.Changed(saving.Settings(&was.Config), saving.Settings(&now.Config))
	require.Equal(t, []string{"epilogues"}, names)
	require.Equal(t, []string{"Config.Epilogues: not in use → none"}, lines)
}
