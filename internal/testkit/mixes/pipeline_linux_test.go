package mixes_test

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// drawPipeline makes a mix over two stages, of an untied model also over one in the first way.
// Its features are those that go with a pipeline.
func drawPipeline(seed uint64) *mix {
	r := rand.New(rand.NewPCG(seed, 35))
	half := func() bool { return r.IntN(2) == 0 }
	pick := func(names ...string) string { return names[r.IntN(len(names))] }
	m := &mix{seed: seed, model: pick("gpt2", "llama-untied"), steps: 3, features: map[string]bool{}, batch: 1 + r.IntN(2)}
	m.flags = []string{"--seed", strconv.FormatUint(1+seed%1000, 10), "--order", pick("sequential", "shuffled"), "--optimizer", pick("adamw", "adamw", "sgd", "adagrad", "lamb")}
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
		m.flags = append(m.flags, "--precision", pick("bf16", "fp16"))
	}
	tensor := 1
	if m.model == "llama-untied" && r.IntN(3) == 0 && r.IntN(2) == 0 {
		tensor = 2
		m.flags = append(m.flags, "--tensor", "2")
		if m.flags[5] == "lamb" {
			m.flags[5] = "adamw"
		}
	}
	data := []int{1, 2}[r.IntN(2)]
	m.accum = []int{1, 2, 4}[r.IntN(3)]
	m.step = data * m.accum * m.batch
	if m.reproducible = half(); m.reproducible {
		m.flags = append(m.flags, "--reproducible")
	} else if data%2 == 0 && half() {
		m.flags = append(m.flags, "--shard-size", strconv.Itoa(data/2))
	}
	stages := func() []string {
		return []string{"--pipeline", "2", "--pipeline-schedule", pick("gpipe", "1f1b"), "--stages", "0-0,1-1"}
	}
	m.first = way{flags: []string{"--zero", "0"}, ranks: data * tensor}
	if m.model == "gpt2" || half() {
		m.first.flags, m.first.ranks = append(m.first.flags, stages()...), 2*m.first.ranks
	}
	w := way{flags: append([]string{"--zero", pick("0", "1"), "--prefetch", strconv.Itoa(r.IntN(3)), "--recompute", pick("none", "selective", "full")}, stages()...), ranks: 2 * data * tensor}
	if half() {
		w.flags = append(w.flags, "--offload", pick("optimizer=host", "optimizer=disk,parameters=host", "gradients=host,activations=host"))
	}
	if half() {
		w.resumeAt, w.after = 1+r.IntN(m.steps-1), w.ranks
	}
	if half() {
		w.transport = transports[r.IntN(len(transports))]
	}
	m.second = w
	return m
}

// Runs over stages have one result over schedules, placements and transports: a few, with
// SPILLWAY_LONG=1 60, with SPILLWAY_LONG=all 300.
func TestPipelineMixesHaveOneResult(t *testing.T) {
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
		m := drawPipeline(seed)
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
