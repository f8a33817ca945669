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

// profiledShape is the model of a profiled run. It has the shapes of 124M in two layers, so that
// one step has every kernel only a few times: ncu repeats each for every pass.
var profiledShape = shape{2, 12, 768, 50257, 1024}

// ncuLaunches is the number of launches that ncu profiles, more than a step of profiledShape has.
const ncuLaunches = 150

// Time limits of the profilers, which stop and repeat the work that they profile.
var ncuLimit, nsysLimit, nsysStatsLimit = 60 * time.Second, 40 * time.Second, 30 * time.Second

// ncuMetrics are the metrics requested from ncu, with names that all its versions have.
var ncuMetrics = []string{
	"gpu__time_duration.sum",
	"sm__throughput.avg.pct_of_peak_sustained_elapsed",
	"gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
	"sm__warps_active.avg.pct_of_peak_sustained_active",
}

// profiledRun returns the command of the training run to profile.
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
	// Launched singly, because not every version can profile a graph.
	return []string{b.program("spillway"), "train", "--device", b.device, "--model", config, "--data", config + ".bin", "--batch", "4", "--seq", seq,
		"--steps", number(steps), "--zero", "0", "--precision", "bf16", "--cuda-graphs", "off"}, nil
}

// runProfilers profiles a training run with ncu and nsys, if they are installed.
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

// runNsys reports the kernels that take a step's time.
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

// kernelTime is a line of nsys's output: a kernel's share of all kernels' time in %, and its mean
// time in ns.
type kernelTime struct {
	name        string
	share, mean float64
	launches    int
}

// table finds comma-separated values among other lines by a cell of their header. It returns the
// rows as maps from header to value. Lines whose number of cells differs from the header's are
// ignored.
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
			continue // a line of the program's own output
		}
		row := map[string]string{}
		for i, c := range cells {
			row[names[i]] = c
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// value parses a number in the profilers' format, with commas between thousands.
func value(s string) (float64, bool) {
	v, err := strconv.ParseFloat(strings.ReplaceAll(s, ",", ""), 64)
	return v, err == nil
}

// readNsys parses the summary of kernels and returns them longest first.
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

// noCounters is ncu's error if the driver restricts its counters to administrators.
const noCounters = "ERR_NVGPUCTRPERM"

// runNcu reports how close each kernel is to the card's limits.
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
	kernels, err := readNcu(string(o.out)) // output before a hang or failure is used too
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

// profiledKernel holds a kernel's launches: their total time in ns, and the time-weighted means of
// shares in %.
type profiledKernel struct {
	name                    string
	launches                int
	time, sm, memory, warps float64
}

// readNcu parses ncu's table with one metric per row and returns the kernels longest first.
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
		if l.known&1 == 0 { // without a time the row is useless
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
