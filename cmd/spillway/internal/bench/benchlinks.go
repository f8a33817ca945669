package bench

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/calibration"
	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/algo"
	"github.com/spillway-ml/spillway/memplan/cost"
)

// leastKept is the minimum of the largest buffer, in bytes, from which the time of a byte can be
// fitted.
const leastKept = 1 << 20

// KeepLinks stores the measurements for predicted times. It returns a message with the file, or
// with the reason why they are not stored.
func KeepLinks(rows []CommRow) string {
	samples := linkSamples(rows)
	largest := int64(0)
	for _, r := range rows {
		largest = max(largest, r.Bytes)
	}
	kinds := map[cost.Class]bool{}
	for _, s := range samples {
		kinds[s.Class] = true
	}
	// Broadcasts may be missing. Buffers are rounded down to equal numbers of elements a rank.
	if len(kinds) < len(measured)-1 || largest <= leastKept-4*int64(rows[0].Ranks) {
		return "not kept for plans: that takes two ranks or more, all operations, each by an algorithm that auto takes there (--collectives direct, or all), and buffers up to 1MiB at least"
	}
	links := cost.FitLinks(rows[0].Transport, rows[0].Ranks, samples)
	for _, c := range fastestOf(rows).Choices {
		links.Fastest = append(links.Fastest, cost.Fastest{Op: string(c.Op), Bytes: c.Bytes, Algorithm: string(c.Algorithm)})
	}
	path, err := calibration.KeepLinks(links)
	if err != nil {
		return "warning: " + err.Error()
	}
	return fmt.Sprintf("kept for plan --transport %s and train --fit in %s", rows[0].Transport, path)
}

// linkSamples returns, for each operation and size, the measurement of the algorithm that train's
// --collectives auto chooses, or else of the transport's own.
func linkSamples(rows []CommRow) (samples []cost.Sample) {
	type key struct {
		op    comm.Op
		bytes int64
	}
	chosen := map[key]CommRow{}
	table := fastestOf(rows)
	for _, r := range rows {
		if r.Ranks < 2 || r.Op == comm.Broadcast { // no program broadcasts
			continue
		}
		auto := algo.Direct
		if r.Transport == cluster.MPI && r.Op != comm.AllToAll {
			if auto = table.Best(r.Op, r.Ranks, r.perHost, r.Bytes); auto == "" {
				auto = algo.Cluster.Best(r.Op, r.Ranks, r.perHost, r.Bytes)
			}
		}
		k := key{r.Op, r.Bytes}
		if _, there := chosen[k]; !there && r.Algorithm == algo.Direct || r.Algorithm == auto || r.Algorithm == algo.Auto {
			chosen[k] = r
		}
	}
	for k, r := range chosen {
		sent := k.bytes / int64(r.Ranks) * int64(r.Ranks-1)
		if k.op == comm.AllReduce {
			sent *= 2
		}
		samples = append(samples, cost.Sample{Class: cost.Class(k.op), Size: cost.Size{Bytes: float64(sent)}, Seconds: r.Seconds})
	}
	slices.SortFunc(samples, func(a, b cost.Sample) int { // the fit must not depend on the map's order
		return cmp.Or(cmp.Compare(a.Class, b.Class), cmp.Compare(a.Size.Bytes, b.Size.Bytes))
	})
	return samples
}

// fastestOf returns, among the measured algorithms, the choices for train's --collectives auto.
// There are none if only one was measured, or in shared memory, where the transport's own algorithm
// moves every byte once.
func fastestOf(rows []CommRow) (t algo.Table) {
	type key struct {
		op    comm.Op
		bytes int64
	}
	best, tried := map[key]CommRow{}, map[key]int{}
	for _, r := range rows {
		if r.Transport != cluster.MPI || r.Ranks < 2 || !slices.Contains(algo.OneBracketing, r.Algorithm) {
			continue
		}
		k := key{r.Op, r.Bytes}
		if b, there := best[k]; !there || r.Seconds < b.Seconds {
			best[k] = r
		}
		tried[k]++
		t.Ranks = r.Ranks
	}
	for k, r := range best {
		if tried[k] > 1 {
			t.Choices = append(t.Choices, algo.Choice{Op: k.op, Bytes: k.bytes, Algorithm: r.Algorithm})
		}
	}
	slices.SortFunc(t.Choices, func(a, b algo.Choice) int { return cmp.Or(cmp.Compare(a.Op, b.Op), cmp.Compare(a.Bytes, b.Bytes)) })
	return t
}
