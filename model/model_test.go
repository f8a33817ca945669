package model

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

func TestTmp(t *testing.T) {
	c := Config{Family: GPT2, Layers: 1, Width: 8, Heads: 2, Vocab: 11, Positions: 6, TiedHead: true, ResidDropout: 0.1, EmbdDropout: 0.2}
	p, err := Build(c, Train, 2, 4)
	require.NoError(t, err)
	q, err := graph.Differentiate(p)
	require.NoError(t, err)
	q = graph.Fuse(q)
	name := func(id graph.BufID) string { if id < 0 { return "_" }; return q.Buf(id).Name }
	for _, op := range q.Sections[0].Phases[0].Ops {
		fmt.Print(op.Name, ": ", op.Kind, " ")
		for _, i := range op.In { fmt.Print(name(i), ", ") }
		fmt.Print("-> ")
		for _, o := range op.Out { fmt.Print(o.Mode, " ", name(o.Buf), ", ") }
		fmt.Println()
	}
	c = Config{Family: Llama, Layers: 126, Width: 16384, Heads: 128, KVHeads: 8, FFN: 53248, Vocab: 128256, Positions: 131072}
	for range 3 {
	t0 := time.Now()
	p, err = Build(c, Train, 1, 8192)
	require.NoError(t, err)
	t1 := time.Now()
	q, err = graph.Differentiate(p)
	require.NoError(t, err)
	t2 := time.Now()
	r := graph.Fuse(q)
	fmt.Println(p.ParamElems(), t1.Sub(t0), t2.Sub(t1), time.Since(t2), len(r.Sections[0].Phases[0].Ops))
	}
}
