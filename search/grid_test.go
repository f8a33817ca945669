package search

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
)

// preset returns a job of a published model. A positive layers replaces its number of layers.
func preset(t *testing.T, name string, layers int) *job {
	p, err := model.LookupPreset(name)
	require.NoError(t, err)
	c := p.Config
	if layers > 0 {
		c.Layers = layers
	}
	return &job{layers: c.Layers, target: graph.CUDATarget(), build: func(sh Shape) (*graph.Program, error) {
		one := c
		if sh.Layers > 0 {
			one.Layers = sh.Layers
		}
		return model.Build(one, model.Train, sh.Batch, sh.Seq)
	}}
}

// drawnJob is a random job: a model, a cluster, caps on device and host memory, and sometimes a
// disk. Every third job has more than 16 layers.
type drawnJob struct {
	name string
	spec Spec
	hw   Hardware
}

func drawJob(t *testing.T, n int) drawnJob {
	rng := rand.New(rand.NewPCG(35, uint64(n)))
	pick := func(list ...int) int { return list[rng.IntN(len(list))] }
	names := []string{"gpt2", "gpt2-medium", "llama-3.2-1b", "qwen3-0.6b", "gpt2-xl", "llama-3-8b"}
	name, layers := names[rng.IntN(len(names))], 2+rng.IntN(7)
	if n%3 == 2 {
		layers = 17 + rng.IntN(24)
	}
	cards := []string{"rtx-4090", "a100-40", "a100-80", "h100-80", "v100-32", "l40s", "t4-16"}
	card, err := gpus.Lookup(cards[rng.IntN(len(cards))])
	require.NoError(t, err)
	ranks := pick(1, 1, 2, 4, 8)
	s := preset(t, name, layers).spec(ranks, pick(1, 2, 4, 8), pick(256, 512, 1024))
	if card.Rates.BF16 > 0 {
		s.Precision = precision.BF16
	}
	s.Outside[graph.Device], s.Outside[graph.Host] = card.OutsideBytes(), gpus.HostOutsideBytes
	hw := Hardware{Machine: func(ranks int) *cost.Machine { return card.Machine(ranks) }}
	w := newSearcher(t.Context(), s, hw.Machine(ranks), true, nil)
	b := s.asBase()
	set, err := w.moves(b)
	require.NoError(t, err)
	m := w.measure(w.plain(b, set))
	require.NoError(t, m.err)
	s.Disk = rng.IntN(2) == 0
	s.Capacity[graph.Device] = min(card.Memory, s.Outside[graph.Device]+int64((0.2+0.75*rng.Float64())*float64(m.need[graph.Device]-s.Outside[graph.Device])))
	if rng.IntN(3) > 0 {
		s.Capacity[graph.Host] = 1<<30 + int64((0.1+rng.Float64())*float64(m.need[graph.Device]))
	}
	return drawnJob{fmt.Sprintf("%d: %s of %d layers, %d × %s, %d × %d, device %.1f, host %.1f, disk %v", n, name, layers, ranks, card.Name, s.Batch, s.Seq,
		float64(s.Capacity[graph.Device])/(1<<30), float64(s.Capacity[graph.Host])/(1<<30), s.Disk), s, hw}
}

// gridPoints are 300 configurations of a job: stages, prefetch distances, policies, and
// classes that rest in whole or in uneven parts on host and disk.
func gridPoints(t *testing.T, s Spec, n int) (list []Spec) {
	places := []string{"", "optimizer=host", "parameters=host", "optimizer=host,parameters=host", "activations=host", "optimizer=host,activations=host",
		"optimizer=host,parameters=host,gradients=host", "optimizer=host,parameters=host,activations=host", "optimizer=host,parameters=host,gradients=host,activations=host"}
	for _, share := range []int{15, 25, 35, 50, 65, 75, 90} {
		places = append(places, fmt.Sprintf("optimizer=host:%d%%", share), fmt.Sprintf("parameters=host:%d%%", share), fmt.Sprintf("optimizer=host:%d%%,activations=host", share),
			fmt.Sprintf("optimizer=host:%d%%,parameters=host", share), fmt.Sprintf("optimizer=host,parameters=host:%d%%", share), fmt.Sprintf("optimizer=host,gradients=host:%d%%", share))
	}
	if s.Disk {
		for _, p := range slices.Clone(places[1:]) {
			places = append(places, strings.ReplaceAll(p, "host", "disk"), strings.Replace(p, "optimizer=host", "optimizer=disk", 1))
		}
		for _, host := range []int{10, 20, 30, 38, 50, 60} {
			for _, disk := range []int{15, 30, 42, 60} {
				if host+disk < 100 {
					places = append(places, fmt.Sprintf("optimizer=host:%d%%+disk:%d%%", host, disk), fmt.Sprintf("optimizer=host:%d%%+disk:%d%%,parameters=host", host, disk))
				}
			}
			places = append(places, fmt.Sprintf("optimizer=host:%d%%+disk,parameters=host", host), fmt.Sprintf("optimizer=host:%d%%+disk", host), fmt.Sprintf("optimizer=disk,parameters=host:%d%%+disk", host))
		}
	}
	stages := []int{3}
	if s.Ranks > 1 {
		stages = []int{3, 2, 1, 0}
	}
	for _, place := range places {
		o, err := offload.Parse(place)
		require.NoError(t, err)
		for _, z := range stages {
			for ahead := range 2 {
				for _, r := range []recompute.Options{{}, policyOf(recompute.Selective), policyOf(recompute.Full)} {
					c := s
					c.Stage, c.Prefetch, c.Recompute, c.Offload = z, ahead, r, o
					list = append(list, c)
				}
			}
		}
	}
	rng := rand.New(rand.NewPCG(35, 300))
	rng.Shuffle(len(list), func(i, k int) { list[i], list[k] = list[k], list[i] })
	return list[:min(len(list), n)]
}

// bestOfGrid returns the shortest time per token among the grid's plans that fit, or +Inf if none
// fits.
func bestOfGrid(t *testing.T, s Spec, m *cost.Machine, n int) (best float64, flags string) {
	best = math.Inf(1)
	for _, c := range gridPoints(t, s, n) {
		f, err := predict(t.Context(), c, m, 0, bounds)
		if err != nil || 1/f.TokensPerSecond() >= best {
			continue // or a class that this stage cannot place
		}
		if f, err = predict(t.Context(), c, m, 0, early); err == nil && f.Fits() {
			best, flags = 1/f.TokensPerSecond(), fmt.Sprint(keyOf(&c))
		}
	}
	return best, flags
}

// On random jobs the search must come within 2 % of the best point of a grid that it does not know.
// The same planner plans the grid's points. With less memory the search must not find a plan that
// is more than 1 % faster.
func TestSearchAgainstAGrid(t *testing.T) {
	jobs, points := long.Of(10, 40, 200), long.Of(25, 100, 300)
	for n := range jobs {
		j := drawJob(t, n)
		t.Run(j.name, func(t *testing.T) {
			t.Parallel()
			fit := func(s Spec) (float64, string, int) {
				got, err := Fit(t.Context(), s, Given{}, nil, 0, j.hw)
				if err != nil {
					var none *NothingFits
					require.ErrorAs(t, err, &none)
					return math.Inf(1), "nothing", none.Tried
				}
				require.NoError(t, got.Plan.Fit())
				for _, u := range got.RunnersUp {
					require.LessOrEqual(t, u.Device, s.Capacity[graph.Device], "it is said to fit too")
				}
				return 1 / got.TokensPerSecond(), keyOf(&got.Spec), got.Tried
			}
			time, flags, tried := fit(j.spec)
			least, of := bestOfGrid(t, j.spec, j.hw.Machine(j.spec.Ranks), points)
			t.Logf("%.4f of the grid's best, %d plans, %s; grid %s", time/least, tried, flags, of)
			if !math.IsInf(least, 1) {
				require.LessOrEqual(t, time/least, 1.02, "%s is slower than %s", flags, of)
			}
			if n > 1 && !long.On() { // 0 has few layers, 1 many
				return
			}
			less := j.spec
			less.Capacity[graph.Device] = less.Capacity[graph.Device] * 95 / 100
			less.Capacity[graph.Host] = less.Capacity[graph.Host] * 9 / 10
			under, other, _ := fit(less)
			require.LessOrEqual(t, time, 1.01*under, "with less memory %s is faster than %s", other, flags)
		})
	}
}
