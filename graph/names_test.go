package graph

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMatchName(t *testing.T) {
	for _, c := range []struct {
		pattern, name string
		want          bool
	}{
		{"h.*", "h.3", true}, {"h.{0-11}.mlp.act", "h.11.mlp.act", true}, {"h.{0-11}.mlp.act", "h.12.mlp.act", false},
		{"h.{2-2}.ln_1", "h.2.ln_1", true}, {"h.{0-3}.ln_?", "h.3.ln_2", true}, {"h.{0-3}.ln_1", "h.30.ln_1", false},
		{"*.{1-2}.*", "model.layers.2.mlp", true}, {"*.{1-2}.*", "model.layers.3.mlp", false}, {"{0-9}{0-9}", "12", false},
		{"l{0-1}.e{4-5}", "l1.e5", true}, {"l{0-1}.e{4-5}", "l1.e6", false}, {"h.{0-3}", "h.", false},
	} {
		got, err := MatchName(c.pattern, c.name)
		require.NoError(t, err)
		require.Equal(t, c.want, got, "%s %s", c.pattern, c.name)
		require.NoError(t, CheckPattern(c.pattern))
	}
	for _, bad := range []string{"", "h.{", "h.{3}", "h.{4-1}", "h.{a-b}", "h.{-1-3}", "[", "h.{0-1}["} {
		require.Error(t, CheckPattern(bad), bad)
	}
}
