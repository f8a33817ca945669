package nearest

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPatterns(t *testing.T) {
	names := []string{"wte.weight", "h.0.mlp.act", "h.1.mlp.act", "h.1.attn.proj", "model.layers.0.q_proj"}
	for pattern, want := range map[string]string{
		"wte.wieght":        "wte.weight",
		"h.1.mlp.acts":      "h.1.mlp.act",
		"h.*.mpl.act":       "h.*.mlp.act",
		"h.{0-1}.mlp.acct":  "h.*.mlp.act",
		"layers.0.*":        "model.layers.0.*",
		"transformer.h.1.*": "h.1.*",
		"wtf.*":             "wte.*",
		"h.1.atn.*":         "h.1.attn.*",
		"":                  "wte.weight",
		"h.{0":              "h.*",
	} {
		require.Equal(t, want, Patterns(pattern, names, 3)[0], pattern)
	}
	require.Empty(t, Patterns("x", nil, 3))
}
