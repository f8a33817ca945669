package lora

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

func TestParse(t *testing.T) {
	o, err := Parse("r=16,alpha=32,targets=*.attn.*,*.mlp.*,dropout=0.05")
	require.NoError(t, err)
	require.Equal(t, Options{Rank: 16, Alpha: 32, Targets: []string{"*.attn.*", "*.mlp.*"}, Dropout: 0.05}, o)
	least, err := Parse("r=16")
	require.NoError(t, err)
	require.Equal(t, Options{Rank: 16, Alpha: 32}, least)
	require.Equal(t, "r=16,alpha=32", least.String())
	again, err := Parse(o.String())
	require.NoError(t, err)
	require.Equal(t, o, again)
	for _, none := range []string{"", "none"} {
		o, err = Parse(none)
		require.NoError(t, err)
		require.False(t, o.Active())
		require.Empty(t, o.String())
	}
	for text, said := range map[string]string{
		"alpha=32":                          "r is 0",
		"r=0,alpha=32,targets=*":            "r is 0",
		"r=x,alpha=32,targets=*":            `r is "x"`,
		"r=1,r=2,alpha=32,targets=*":        "r is given twice",
		"r=1,alpha=inf,targets=*":           "alpha is +Inf",
		"r=1,alpha=1,targets=":              "a pattern is empty",
		"r=1,alpha=1,targets=[":             "is not a pattern",
		"r=1,alpha=1,target=*":              `"target=*" is not known`,
		"16":                                `"16" is not known`,
		"r=1,alpha=1,targets=*,dropout=1":   "dropout is 1",
		"r=1,alpha=1,targets=*,dropout=nan": "dropout is NaN",
		"r=99999999,alpha=1,targets=*":      "from 1 to 65536",
	} {
		_, err := Parse(text)
		require.ErrorContains(t, err, said, text)
	}
}

// TestNearestTargets checks that a LoRA target that matches nothing yields suggestions that do
// match. No suggestion may select every parameter if the target starts with an asterisk.
func TestNearestTargets(t *testing.T) {
	var names []string
	for _, l := range []string{"self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj"} {
		names = append(names, "model.layers.0."+l+".weight", "model.layers.1."+l+".weight")
	}
	a := &adapter{names: names}
	for target, want := range map[string]string{"*.attn.*": "*.self_attn.*", "*.q_porj.*": "*.q_proj.*", "*gate*": "*.gate_proj.*", "model.layers.1.slef_attn.*": "model.layers.1.self_attn.*"} {
		got := a.nearest(target)
		require.Equal(t, want, got[0], target)
		for _, pattern := range got {
			matched := 0
			for _, name := range names {
				if ok, _ := graph.MatchName(pattern, name); ok {
					matched++
				}
			}
			require.NotZero(t, matched, pattern)
			require.True(t, matched < len(names) || target[0] != '*', "%s selects everything", pattern)
		}
	}
}
