package main

import (
	"cmp"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A profiled run's model has the shapes of 124M in two layers, so that one step has
// every kernel a few times: each is run again for every pass of ncu's.
var profiledShape = shape{2, 12, 768, 50257, 1024}

// ncuLaunches is how many launches ncu looks at: more than a step of profiledShape has.
const ncuLaunches = 150

// Limits of the profilers, which stop and repeat what they look at.
var ncuLimit, nsysLimit, nsysStatsLimit = 60 * time.Second, 40 * time.Second, 30 * time.Second

// ncuMetrics are what ncu is asked for, under the names that all its versions have.
var ncuMetrics = []string{
	"gpu__time_duration.sum",
	"sm__throughput.avg.pct_of_peak_sustained_elapsed",
	"gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
	"sm__warps_active.avg.pct_of_peak_sustained_active",
}

// profiledRun is the training run that is profiled.
func (b *bundle) profiledRun(steps int) ([]string, error) {
	s, seq := profiledShape, "1024"
	if b.quick {
		s, seq = tinyShape, "64"
	}
	config := filepath.Join(b.work, "config-profile")
	if err := s.writeConfig(config); err != nil {
		return nil, err
	}
	if err := tokens(config+".bin", 1<<17, s.vocab, 5); err != nil {
		return nil, err
	}
	// Launched one by one: not every version looks into a graph.
	return []string{b.program("spillway"), "train", "--device", b.device, "--model", config, "--data", config + ".bin", "--batch", "4", "--seq", seq,
		"--steps", number(steps), "--zero", "0", "--precision", "bf16", "--cuda-graphs", "off"}, nil
}

// runProfilers has ncu and nsys look at a training run, where they are there.
func runProfilers(ctx context.Context, b *bundle, r *result) {
	if b.gpu == nil {
		r.skip("on the CPU there are no kernels to profile")
		return
	}
	ncu, nsys := r.tool("ncu"), r.tool("nsys")
	if ncu == "" && nsys == "" {
		r.skip("nothing was profiled")
		return
	}
	if nsys != "" {
		b.runNsys(ctx, r, nsys)
	}
	if ncu != "" && ctx.Err() == nil {
		b.runNcu(ctx, r, ncu)
	}
}

// runNsys says which kernels a step's time goes to.
func (b *bundle) runNsys(ctx context.Context, r *result, nsys string) {
	run, err := b.profiledRun(6)
	if err != nil {
		r.fail("%v", err)
		return
	}
	report := filepath.Join(b.work, "profile")
	args := append([]string{"profile", "--trace=cuda", "--sample=none", "--force-overwrite=true", "--stats=false", "--output=" + report}, run...)
	if o := b.within(ctx, nsysLimit, "nsys", b.work, oneGPU(), nsys, args...); o.status != 0 {
		r.fail("nsys %s (logs/nsys.txt)", shorten(o.ended(), 300))
		return
	}
	found, err := filepath.Glob(report + ".*rep")
	if err != nil || len(found) == 0 {
		r.fail("nsys left no report (logs/nsys.txt)")
		return
	}
	var o *outcome
	for _, name := range []string{"cuda_gpu_kern_sum", "gpukernsum"} { // since 2023, before
		o = b.within(ctx, nsysStatsLimit, "nsys-"+name, b.work, nil, nsys, "stats", "--report", name, "--format", "csv", "--force-export=true", found[0])
		rows, err := readNsys(string(o.out))
		if err != nil {
			continue
		}
		for _, k := range rows[:min(len(rows), 10)] {
			r.say("nsys: %s takes %s %% of the kernels' time, %d launches of %s µs", k.name, ratio(k.share), k.launches, ratio(k.mean/1e3))
		}
		return
	}
	r.fail("nsys stats has no kernels: it %s (logs/nsys-gpukernsum.txt)", shorten(o.ended(), 300))
}

// kernelTime is a line of nsys: a share of all kernels' time in %, a mean in ns.
type kernelTime struct {
	name        string
	share, mean float64
	launches    int
}

// table finds a table of comma-separated values among other lines, by a cell of its
// head, and gives its rows as maps from the head. A row that is not of the head's width
// is no row of it.
func table(text, head string) ([]map[string]string, error) {
	lines := strings.Split(text, "\n")
	start := slices.IndexFunc(lines, func(l string) bool {
		cells, err := csv.NewReader(strings.NewReader(l)).Read()
		return err == nil && slices.Contains(cells, head)
	})
	if start < 0 {
		return nil, fmt.Errorf("there is no column %q", head)
	}
	names, err := csv.NewReader(strings.NewReader(lines[start])).Read()
	if err != nil {
		return nil, err
	}
	var rows []map[string]string
	for _, l := range lines[start+1:] {
		cells, err := csv.NewReader(strings.NewReader(l)).Read()
		if err != nil || len(cells) != len(names) {
			continue // a line of the program's own
		}
		row := map[string]string{}
		for i, c := range cells {
			row[names[i]] = c
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// value reads a number as the profilers print it, with commas between thousands.
func value(s string) (float64, bool) {
	v, err := strconv.ParseFloat(strings.ReplaceAll(s, ",", ""), 64)
	return v, err == nil
}

// readNsys reads the summary of kernels, the longest first.
func readNsys(text string) ([]kernelTime, error) {
	rows, err := table(text, "Instances")
	if err != nil {
		return nil, err
	}
	var list []kernelTime
	for _, row := range rows {
		share, ok1 := value(cmp.Or(row["Time (%)"], row["Time(%)"]))
		total, ok2 := value(row["Total Time (ns)"])
		launches, ok3 := value(row["Instances"])
		if ok1 && ok2 && ok3 && launches > 0 {
			list = append(list, kernelTime{row["Name"], share, total / launches, int(launches)})
		}
	}
	if len(list) == 0 {
		return nil, errors.New("the table of kernels is empty")
	}
	slices.SortStableFunc(list, func(a, b kernelTime) int { return cmp.Compare(b.share, a.share) })
	return list, nil
}

// noCounters is what ncu says where the driver keeps its counters to the administrator.
const noCounters = "ERR_NVGPUCTRPERM"

// runNcu says how near each kernel comes to what the card can do.
func (b *bundle) runNcu(ctx context.Context, r *result, ncu string) {
	run, err := b.profiledRun(1)
	if err != nil {
		r.fail("%v", err)
		return
	}
	args := append([]string{"--csv", "--print-units", "base", "--clock-control", "none", "--target-processes", "all",
		"--launch-count", number(ncuLaunches), "--metrics", strings.Join(ncuMetrics, ",")}, run...)
	o := b.within(ctx, ncuLimit, "ncu", b.work, oneGPU(), ncu, args...)
	text := string(o.out) + "\n" + string(o.err)
	if strings.Contains(text, noCounters) {
		r.say("ncu: the driver gives its counters to the administrator alone (%s)", noCounters)
		return
	}
	kernels, err := readNcu(string(o.out)) // what came before a hang or a failure counts
	if o.status != 0 {
		r.fail("ncu %s (logs/ncu.txt)", shorten(o.ended(), 300))
	} else if err != nil {
		r.fail("ncu: %v (logs/ncu.txt)", err)
	}
	if len(kernels) == 0 {
		return
	}
	r.Table = [][]string{{"kernel", "launches", "µs together", "of the multiprocessors' peak, %", "of the memory's, %", "warps active, %"}}
	for _, k := range kernels[:min(len(kernels), 14)] {
		r.Table = append(r.Table, []string{cell(shorten(k.name, 60)), number(k.launches), ratio(k.time / 1e3), ratio(k.sm), ratio(k.memory), ratio(k.warps)})
	}
}

// profiledKernel is a kernel's launches: their time together in ns, and the means of
// shares in % weighted by time.
type profiledKernel struct {
	name                    string
	launches                int
	time, sm, memory, warps float64
}

// readNcu reads ncu's table of a metric a row, the longest kernel first.
func readNcu(text string) ([]profiledKernel, error) {
	rows, err := table(text, "Metric Name")
	if err != nil {
		return nil, err
	}
	type launch struct {
		kernel string
		values [4]float64
		known  int
	}
	byID := map[string]*launch{}
	var order []string
	for _, row := range rows {
		which := slices.Index(ncuMetrics, row["Metric Name"])
		v, ok := value(row["Metric Value"])
		if which < 0 || !ok {
			continue
		}
		id := row["Process ID"] + " " + row["ID"]
		if byID[id] == nil {
			byID[id] = &launch{kernel: row["Kernel Name"]}
			order = append(order, id)
		}
		byID[id].values[which] = v
		byID[id].known |= 1 << which
	}
	sums := map[string]*profiledKernel{}
	for _, id := range order {
		l := byID[id]
		if l.known&1 == 0 { // no time: it says nothing
			continue
		}
		k := sums[l.kernel]
		if k == nil {
			k = &profiledKernel{name: l.kernel}
			sums[l.kernel] = k
		}
		k.launches++
		k.time += l.values[0]
		k.sm, k.memory, k.warps = k.sm+l.values[0]*l.values[1], k.memory+l.values[0]*l.values[2], k.warps+l.values[0]*l.values[3]
	}
	var list []profiledKernel
	for _, k := range sums {
		if k.time > 0 {
			k.sm, k.memory, k.warps = k.sm/k.time, k.memory/k.time, k.warps/k.time
		}
		list = append(list, *k)
	}
	if len(list) == 0 {
		return nil, errors.New("no kernel has a time")
	}
	slices.SortFunc(list, func(a, b profiledKernel) int {
		return cmp.Or(cmp.Compare(b.time, a.time), cmp.Compare(a.name, b.name))
	})
	return list, nil
}
