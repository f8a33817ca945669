package offload_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/fsdp"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan"
	"github.com/spillway-ml/spillway/offload"
)

func parse(t *testing.T, text string) offload.Options {
	t.Helper()
	o, err := offload.Parse(text)
	require.NoError(t, err)
	return o
}

// Shares of the states leave the device unit by unit and are divided between the tiers.
func TestSharesOfStates(t *testing.T) {
	p := sharded(t, 6, 2, fsdp.Options{Stage: 3})
	bytes := func(text string) (on [graph.NumSpaces]int64) {
		q := rewrite(t, p, parse(t, text))
		for _, u := range q.Units {
			for _, s := range u.States {
				on[q.Buf(s.Buf).Space] += q.Buf(s.Buf).Bytes()
			}
		}
		return on
	}
	total := bytes("")[graph.Device]
	for _, text := range []string{"optimizer=host:60%", "optimizer=host:25%+disk:35%", "optimizer=disk:60%"} {
		on := bytes(text)
		require.LessOrEqual(t, float64(on[graph.Device]), 0.4*float64(total), text)
		require.Greater(t, on[graph.Device], total/10, "and no more than a unit more")
		require.Equal(t, total, on[0]+on[1]+on[2])
	}
	on := bytes("optimizer=host:40%+disk")
	require.Zero(t, on[graph.Device])
	require.Positive(t, on[graph.Host])
	require.LessOrEqual(t, float64(on[graph.Disk]), 0.6*float64(total)*1.000001)
	require.Equal(t, bytes("optimizer=host"), bytes("optimizer=host:100%"))
	// Parameters and gradients each have their own share.
	q := rewrite(t, p, parse(t, "parameters=host:50%,gradients=disk:30%"))
	units := map[graph.Space]int{}
	for _, u := range q.Units {
		units[q.Buf(u.Value.Buf).Space]++
	}
	require.Positive(t, units[graph.Host])
	require.Positive(t, units[graph.Device])
}

func TestParkByName(t *testing.T) {
	p := sharded(t, 6, 1, fsdp.Options{})
	q := rewrite(t, p, parse(t, "activations=host:h.{0-1}.mlp.act;h.0.attn+disk:h.{2-2}.mlp.act"))
	got := map[string]graph.Space{}
	for i := range q.Buffers {
		b := &q.Buffers[i]
		if b.Class == graph.Activations && b.Space != graph.Device {
			got[b.Name] = b.Space
		}
	}
	require.Equal(t, map[string]graph.Space{"h.0.mlp.act@host": graph.Host, "h.1.mlp.act@host": graph.Host, "h.0.attn@host": graph.Host, "h.2.mlp.act@disk": graph.Disk}, got)
	all, err := memplan.Analyse(rewrite(t, p, parse(t, "activations=host")))
	require.NoError(t, err)
	both, err := memplan.Analyse(rewrite(t, p, parse(t, "activations=disk:h.0.attn+host")))
	require.NoError(t, err)
	require.Less(t, both.Bounds()[graph.Host].ByClass[graph.Activations], all.Bounds()[graph.Host].ByClass[graph.Activations])
	_, err = offload.Rewrite(p, parse(t, "activations=host:h.9.mlp.act"))
	require.ErrorContains(t, err, `no activation matches "h.9.mlp.act"; the nearest are h.0.mlp.act, `)
}

func TestParsePartsRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"optimizer=host:0%":             "over 0 and up to 100",
		"optimizer=host:120%":           "over 0 and up to 100",
		"optimizer=host:h.*":            "is not a share",
		"optimizer=host:":               "is not a share",
		"optimizer=host:70%+disk:40%":   "come to 110 %",
		"optimizer=host+disk:40%":       "after the one that takes all the rest",
		"optimizer=device:40%":          "is not a place",
		"activations=host:60%":          "go by buffers",
		"activations=host:":             "pattern is empty",
		"activations=host:h.{1}":        "range of numbers",
		"activations=host:a;+disk:b":    "pattern is empty",
		"parameters=disk:NaN%":          "over 0 and up to 100",
		"optimizer=host:50%,optimizer":  "write CLASS=host",
		"optimizer=host,optimizer=disk": "optimizer is given twice",
		"optimizer=host:25%+host":       "host is given twice",
		"activations=disk:a+disk:b":     "disk is given twice",
	} {
		_, err := offload.Parse(text)
		require.ErrorContains(t, err, want, text)
	}
}
