package mixes_test

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
)

// leaves is the micro-batches of a reproducible step.
const leaves = 12

// reproducibleRanks are the numbers of ranks that share them.
var reproducibleRanks = []int{1, 2, 3, 4, 5, 6, 7, 11}

// mix is a run, twice: what fixes its bits, and two ways to compute it.
type mix struct {
	seed         uint64
	flags        []string // of both
	model        string
	rows         int // of the data; 0: all
	steps        int
	epochs       int // in place of steps, which follow; 0: --steps
	accum, ranks int
	batch, step  int    // rows of a micro-batch and of a step
	schedule     string // --batch-schedule, whose largest is step; "": every step has as many
	layer        bool
	reproducible bool
	first        way // the reference: one process, in one go
	second       way
	features     map[string]bool
}

// way is how a run is computed: nothing here may change a bit.
type way struct {
	flags     []string
	ranks     int
	transport string
	resumeAt  int    // step behind which it is resumed; 0: in one go
	after     int    // ranks behind that
	shares    string // --rank-shares of ranks; "": even
	kill      bool
}

// features are what is counted.
var features = []string{"bf16", "fp16", "reduce fp32", "int8 optimizer", "int8 gather", "int8 reduce", "int8 activations", "int8 matmul",
	"layer order", "reproducible", "uneven shares", "padding", "hsdp", "stochastic rounding", "frozen cache", "lora", "int8 base", "bf16 base", "packing", "resume", "resume at other ranks", "transport", "elastic", "batch schedule", "epochs",
	"receipt", "adagrad", "sgd", "lamb", "lars", "larc", "novograd", "muon", "nesterov"}

// draw makes a mix of a seed. Half of the features that go with those drawn before are
// in it, so that every pair that may meet does.
func draw(seed uint64) *mix {
	r := rand.New(rand.NewPCG(seed, 38))
	half := func() bool { return r.IntN(2) == 0 }
	pick := func(names ...string) string { return names[r.IntN(len(names))] }
	m := &mix{seed: seed, model: pick("gpt2", "llama-untied"), steps: 3, features: map[string]bool{}}
	add := func(feature string, flags ...string) {
		m.features[feature] = true
		m.flags = append(m.flags, flags...)
	}
	m.flags = append(m.flags, "--seed", strconv.FormatUint(1+seed%1000, 10), "--order", pick("sequential", "shuffled"))
	if half() {
		m.flags = append(m.flags, "--clip", "0.4")
	}
	precision := pick("fp32", "bf16", "bf16", "fp16")
	if precision != "fp32" {
		add(precision, "--precision", precision)
	}
	low := precision != "fp32"
	if low && r.IntN(4) == 0 {
		add("reduce fp32", "--reduce", "fp32")
	}
	stochastic := precision == "bf16" && r.IntN(3) == 0
	if stochastic {
		add("stochastic rounding", "--optimizer-dtype", "bf16", "--stochastic-rounding")
	}
	adamw := stochastic || half()
	var int8 []string
	for _, name := range []string{"optimizer", "gather", "reduce", "activations", "matmul"} {
		fits := map[string]bool{"optimizer": adamw && !stochastic, "gather": low && !stochastic, "reduce": true, "activations": true, "matmul": low}[name]
		if fits && r.IntN(3) == 0 {
			int8 = append(int8, name)
			add("int8 " + name)
		}
	}
	if len(int8) > 0 {
		m.flags = append(m.flags, "--int8", strings.Join(int8, ","))
	}
	if !adamw {
		name := pick("adagrad", "sgd", "lamb", "lars", "larc", "novograd", "muon")
		add(name, "--optimizer", name)
		if slices.Contains([]string{"sgd", "lars", "larc"}, name) && half() {
			add("nesterov", "--nesterov")
		}
	}
	m.reproducible = half()
	m.ranks = []int{1, 2, 3, 4}[r.IntN(4)]
	m.accum = []int{1, 2, 3}[r.IntN(3)]
	m.batch = 1 + r.IntN(2)
	m.step = m.ranks * m.accum * m.batch
	if m.reproducible {
		add("reproducible", "--reproducible")
		m.ranks = reproducibleRanks[r.IntN(len(reproducibleRanks))]
		m.accum, m.step = (leaves+m.ranks-1)/m.ranks, leaves*m.batch
		if m.batch > 1 && half() {
			m.features["padding"] = true
			m.step--
		}
	} else if m.ranks == 4 && half() {
		add("hsdp", "--shard-size", "2")
	}
	// The gradient of a tied head comes from several blocks, which layer order sums
	// otherwise, and cannot sum leaf by leaf.
	m.layer = m.accum > 1 && m.model != "gpt2" && half()
	adapted := r.IntN(3) == 0
	if adapted {
		add("lora", "--lora", fmt.Sprintf("r=%d,alpha=8,targets=%s,dropout=%s", 1+r.IntN(8), pick("*.1.*", "*.1.*attn*", "*.1.*mlp*"), pick("0", "0.1")))
		switch base := pick("", "int8", "bf16"); {
		case base == "", base == "bf16" && precision == "fp16":
		default:
			add(base+" base", "--base", base)
		}
	}
	if r.IntN(3) == 0 {
		add("packing", "--packing", "on", "--loss-on", pick("answers", "all"), "--long", pick("cut", "drop"))
		if r.IntN(3) == 0 {
			m.flags = append(m.flags, "--eval-split", "20%")
		}
	}
	if r.IntN(3) == 0 {
		add("frozen cache")
		m.steps, m.rows = 5, 2*m.step
		if !adapted {
			m.flags = append(m.flags, "--freeze", map[string]string{"gpt2": "*wte.weight,*wpe.weight,*h.0.*", "llama-untied": "*embed_tokens*,*layers.0.*"}[m.model])
		}
	} else if m.model == "gpt2" && r.IntN(3) == 0 {
		m.flags = append(m.flags, "--dropout", "0.1")
	}
	m.ways(r)
	if !m.layer && m.second.shares == "" && r.IntN(3) == 0 {
		m.features["batch schedule"] = true
		least := m.ranks * m.batch
		if m.reproducible { // at any of the numbers of ranks
			least = slices.Max(reproducibleRanks) * m.batch
		}
		m.schedule = fmt.Sprintf([]string{"0:%d,1:%d", "0:%[2]d,1:%[1]d,2:%[2]d", "0:%[2]d,2:%[1]d"}[r.IntN(3)], min(least, m.step), m.step)
	}
	if r.IntN(3) == 0 {
		m.features["epochs"] = true
		m.count(2 + r.IntN(2))
	}
	m.features["receipt"] = half()
	return m
}

// count gives the run a length in epochs, of which it takes at least as many steps as before.
// Where the data has no number of rows yet, it gets that of so many epochs.
func (m *mix) count(epochs int) {
	total := 0
	for s := range m.steps {
		total += m.rowsOf(s)
	}
	if m.rows > 0 {
		epochs = (total + m.rows - 1) / m.rows
	} else {
		m.rows = (total + epochs - 1) / epochs
	}
	m.epochs = epochs
	for ; total < epochs*m.rows; m.steps++ {
		total += m.rowsOf(m.steps)
	}
}

// rowsOf is the rows of a step.
func (m *mix) rowsOf(step int) int {
	rows := m.step
	for entry := range strings.SplitSeq(m.schedule, ",") {
		var from, n int
		if k, _ := fmt.Sscanf(entry, "%d:%d", &from, &n); k == 2 && from <= step {
			rows = n
		}
	}
	return rows
}

// length are the flags of the run's.
func (m *mix) length() []string {
	if m.epochs > 0 {
		return []string{"--epochs", strconv.Itoa(m.epochs)}
	}
	return []string{"--steps", strconv.Itoa(m.steps)}
}

// ways draws the two ways.
func (m *mix) ways(r *rand.Rand) {
	half := func() bool { return r.IntN(2) == 0 }
	// Stages 0 and 1 agree, and 2 and 3; all do with one micro-batch, where sums go leaf by
	// leaf, and in layer order.
	stages := []int{0, 1, 2, 3}
	if m.accum > 1 && !m.reproducible {
		stages = [][]int{{0, 1}, {2, 3}}[r.IntN(2)]
	}
	m.first = way{ranks: m.ranks, flags: []string{"--zero", strconv.Itoa(stages[0])}}
	w := way{ranks: m.ranks}
	if m.layer { // by itself the sums of stages 0 and 1 in micro order
		m.features["layer order"] = true
		w.flags = append(w.flags, "--accum-order", "layer")
		if !m.reproducible {
			m.first.flags = []string{"--zero", "0"}
			stages = []int{0, 1, 2, 3}
		}
	}
	if m.reproducible {
		w.ranks = reproducibleRanks[r.IntN(len(reproducibleRanks))]
		if w.ranks > 1 && half() {
			w.shares = shares(r, w.ranks)
		}
		m.features["uneven shares"] = w.shares != "" || leaves%w.ranks > 0 || leaves%m.ranks > 0
	}
	w.flags = append(w.flags, "--zero", strconv.Itoa(stages[r.IntN(len(stages))]), "--prefetch", strconv.Itoa(r.IntN(3)),
		"--recompute", []string{"none", "selective", "full"}[r.IntN(3)])
	if half() {
		w.flags = append(w.flags, "--offload", []string{"optimizer=host", "optimizer=disk,parameters=host", "gradients=host,activations=host"}[r.IntN(3)])
	}
	if m.features["frozen cache"] {
		w.flags = append(w.flags, "--frozen-cache", []string{"host:1MiB", "disk:1MiB"}[r.IntN(2)])
	}
	if half() {
		w.resumeAt, w.after = 1+r.IntN(m.steps-1), w.ranks
		m.features["resume"] = true
		if m.reproducible {
			w.after = reproducibleRanks[r.IntN(len(reproducibleRanks))]
			m.features["uneven shares"] = m.features["uneven shares"] || leaves%w.after > 0
		}
		if w.after != w.ranks {
			m.features["resume at other ranks"] = true
		}
	}
	if r.IntN(5) == 0 && m.ranks*w.ranks > 1 {
		w.transport = transports[r.IntN(len(transports))]
		m.features["transport"] = true
	}
	if m.reproducible && w.transport == "launch" && w.ranks > 1 && w.resumeAt == 0 && half() || m.reproducible && w.resumeAt == 0 && r.IntN(3) == 0 {
		w.kill, w.transport, w.ranks, w.shares = true, "launch", 4, ""
		m.steps = 24
		m.features["transport"], m.features["elastic"] = true, true
	}
	m.second = w
}

// shares deals the step's micro-batches to ranks by chance, at least one to each.
func shares(r *rand.Rand, ranks int) string {
	n := make([]int, ranks)
	for i := range leaves {
		if i < ranks {
			n[i]++
		} else {
			n[r.IntN(ranks)]++
		}
	}
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(n), " ", ","), "[]")
}

func (m *mix) String() string {
	return fmt.Sprintf("%s=%d: %s, %d ranks × %d: %s; rows %s; %s; %+v beside %+v", seedVariable, m.seed, m.model, m.ranks, m.accum,
		strings.Join(m.flags, " "), cmp.Or(m.schedule, strconv.Itoa(m.step)), strings.Join(m.length(), " "), m.second, m.first)
}
