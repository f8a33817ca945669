package mixes_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// tensorSlices is what divides the heads of both models.
const tensorSlices = 2

// drawTensor makes a mix whose layers are cut into slices: on one rank of each group in one way,
// on one or two in the other. Its features are those that go with tensor parallelism.
func drawTensor(seed uint64) *mix {
	r := rand.New(rand.NewPCG(seed, 34))
	half := func() bool { return r.IntN(2) == 0 }
	pick := func(names ...string) string { return names[r.IntN(len(names))] }
	m := &mix{seed: seed, model: pick("gpt2", "llama-untied"), steps: 3, features: map[string]bool{}, batch: 1 + r.IntN(2)}
	m.flags = []string{"--seed", strconv.FormatUint(1+seed%1000, 10), "--order", pick("sequential", "shuffled"), "--optimizer", pick("adamw", "adamw", "sgd", "adagrad")}
	if half() {
		m.flags = append(m.flags, "--clip", "0.4")
	}
	if m.model == "gpt2" && r.IntN(3) == 0 {
		m.flags = append(m.flags, "--dropout", "0.1")
	}
	if half() {
		m.features["packing"] = true
		m.flags = append(m.flags, "--packing", "on", "--loss-on", pick("answers", "all"), "--long", pick("cut", "drop"))
	}
	if r.IntN(3) == 0 {
		m.flags = append(m.flags, "--lora", fmt.Sprintf("r=%d,alpha=8,targets=%s", 1+r.IntN(8), pick("*.1.*", "*.1.*attn*", "*.1.*mlp*")))
	}
	m.features["receipt"] = half()
	tensor := func() int { return 1 + r.IntN(tensorSlices) }
	m.flags = append(m.flags, "--tensor-slices", strconv.Itoa(tensorSlices))
	if r.IntN(3) == 0 {
		m.flags = append(m.flags, "--precision", pick("bf16", "fp16"))
		tensor = func() int { return tensorSlices } // a rank has one slice
	}
	data := []int{1, 2, 3, 4}[r.IntN(4)]
	m.accum = []int{1, 2, 4}[r.IntN(3)]
	m.step = data * m.accum * m.batch
	if m.reproducible = half(); m.reproducible {
		m.flags = append(m.flags, "--reproducible")
	} else if data%2 == 0 && half() {
		m.flags = append(m.flags, "--shard-size", strconv.Itoa(data/2))
	}
	stages := []int{0, 1, 2, 3}
	if m.accum > 1 && !m.reproducible {
		stages = [][]int{{0, 1}, {2, 3}}[r.IntN(2)]
	}
	m.first = way{flags: []string{"--zero", strconv.Itoa(stages[0])}, ranks: data}
	w := way{flags: []string{"--prefetch", strconv.Itoa(r.IntN(3)), "--recompute", pick("none", "selective", "full")}, ranks: data}
	if m.accum > 1 && m.model != "gpt2" && half() {
		w.flags = append(w.flags, "--accum-order", "layer")
		if !m.reproducible { // by itself the sums of stages 0 and 1 in micro order
			m.first.flags, stages = []string{"--zero", "0"}, []int{0, 1, 2, 3}
		}
	}
	w.flags = append(w.flags, "--zero", strconv.Itoa(stages[r.IntN(len(stages))]))
	if half() {
		w.flags = append(w.flags, "--offload", pick("optimizer=host", "optimizer=disk,parameters=host", "gradients=host,activations=host"))
	}
	for _, one := range []*way{&m.first, &w} {
		n := tensor()
		one.flags, one.ranks = append(one.flags, "--tensor", strconv.Itoa(n)), one.ranks*n
	}
	if !slices.Contains(w.flags, "layer") && m.accum > 1 && half() {
		m.schedule = fmt.Sprintf("0:%d,1:%d", data*m.batch, m.step)
	}
	if half() {
		w.resumeAt, w.after = 1+r.IntN(m.steps-1), w.ranks
	}
	if r.IntN(3) == 0 && w.ranks > 1 {
		w.transport = transports[r.IntN(len(transports))]
	}
	m.second = w
	return m
}

// Runs whose layers are cut have one result over stages, placements, transports and tensor ranks:
// a few, with SPILLWAY_LONG=1 60, with SPILLWAY_LONG=all 300.
func TestTensorMixesHaveOneResult(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	first, cases := rand.Uint64()>>2, few
	if long.On() {
		first, cases = 1, long.Of(few, 60, 300)
	}
	if text := os.Getenv(seedVariable); text != "" {
		seed, err := strconv.ParseUint(text, 10, 64)
		require.NoError(t, err, seedVariable)
		first, cases = seed, 1
	}
	over := map[string]int{}
	for seed := first; cases > 0; seed++ {
		m := drawTensor(seed)
		if !available(m.second.transport) {
			continue
		}
		compare(t, m)
		if t.Failed() {
			return
		}
		over[m.second.transport]++
		cases--
	}
	t.Logf("comparisons by transport: %v", over)
}
