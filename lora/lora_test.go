package lora

import (
	"testing"

	"github.com/stretchr/testify/require"
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
