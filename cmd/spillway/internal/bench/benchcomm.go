package bench

import (
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/jobs"
	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/algo"
	"github.com/spillway-ml/spillway/comm/algorithm"
	"github.com/spillway-ml/spillway/comm/inproc"
	"github.com/spillway-ml/spillway/comm/mpi"
	"github.com/spillway-ml/spillway/comm/shm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/internal/hostmem"
	"github.com/spillway-ml/spillway/launch"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/platform"
)

// commBench holds the arguments of bench comm.
type commBench struct {
	transport, json string
	ranks           int
	each            int   // ranks of every process, in a job over processes
	most            int64 // bytes of the largest buffer
	timeout         time.Duration
	messages        bool // over MPI, instead of its collectives
	collectives     string
	algorithms      []algo.Name
	operations      []comm.Op
}

// CommCommand returns the command bench comm.
func CommCommand() *cobra.Command {
	b := commBench{most: 256 << 20, collectives: string(algo.Direct), each: 1}
	cmd := &cobra.Command{
		Use:   "comm",
		Short: "Every collective between ranks, from 1 KiB on: time, bandwidth, and the bound by memory",
		Long: `Measure every collective for buffers from 1 KiB to --max-bytes: between the ranks of this
process (--ranks), of several processes (spillway launch -n N -- bench comm), or over MPI
(mpirun -np N spillway bench comm). The table also has the lower bound by memory on one
host: the bytes that the ranks load and store, divided by the bandwidth at which they all
copy at once, measured in the same run. Over MPI the library's own collectives are measured in turn.
--collectives all has a row for each algorithm, and its estimated time on a link of the
cluster kind. The times of the algorithms that auto chooses are stored, by
transport and ranks, for the predicted times of plan --transport and train --fit.`,
		Args: cli.NoArguments,
	}
	fs := cmd.Flags()
	fs.StringVar(&b.transport, "transport", cluster.Auto, "auto, inproc, shm (spillway launch) or mpi (mpirun)")
	fs.IntVar(&b.ranks, "ranks", 2, "ranks of this process, if it is the only one")
	fs.IntVar(&b.each, "ranks-per-process", b.each, "ranks of each process in a job over processes")
	fs.Var(cli.Size(&b.most), "max-bytes", "size of the largest buffer")
	fs.Lookup("max-bytes").DefValue = "256MiB"
	operation := fs.String("operation", "", "measure one operation only: all_reduce, reduce_scatter, all_gather, broadcast or all_to_all")
	fs.StringVar(&b.collectives, "collectives", b.collectives, "an algorithm of train's --collectives, several separated by commas, or all")
	fs.DurationVar(&b.timeout, "timeout", time.Minute, "longest wait of a collective")
	fs.StringVar(&b.json, "json", "", "write a row for each measurement as JSON to `FILE`, - for stdout")
	fs.BoolVar(&b.messages, "messages", false, "over MPI, use messages between pairs of ranks, as train does with several ranks a process, instead of the library's non-blocking collectives")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if strings.EqualFold(b.transport, cluster.NCCL) {
			return errors.New("--transport nccl: bench comm measures CPU ranks, which meet by inproc, shm (spillway launch -n N -- bench comm) or mpi (mpirun -np N spillway bench comm); train --device cuda --trace FILE has the times of NCCL's collectives")
		}
		p, err := jobs.FindPlace(b.transport, "cpu", cmd.ErrOrStderr())
		if err != nil {
			return err
		}
		if err := p.Carries("cpu"); err != nil { // it measures CPU ranks
			return err
		}
		if b.messages && p.Transport != cluster.MPI {
			return fmt.Errorf("--messages with transport %s: only MPI has both: mpirun -np N spillway bench comm", p.Transport)
		}
		if fs.Changed("ranks") {
			if err := p.Env.CheckRanks(b.ranks, b.each); err != nil {
				return err
			}
		}
		for name, n := range map[string]int{"ranks": b.ranks, "ranks-per-process": b.each} {
			if n < 1 || n > platform.MaxLocalRanks {
				return fmt.Errorf("--%s %d: 1 to %d", name, n, platform.MaxLocalRanks)
			}
		}
		if p.Transport == cluster.InProc && fs.Changed("ranks-per-process") {
			if fs.Changed("ranks") && b.ranks != b.each {
				return fmt.Errorf("--ranks %d with --ranks-per-process %d: one process runs all ranks here; spillway launch -n N starts several", b.ranks, b.each)
			}
			b.ranks = b.each
		}
		if b.timeout <= 0 {
			return fmt.Errorf("--timeout %v: a positive duration is needed", b.timeout)
		}
		if err := b.fits(p); err != nil {
			return err
		}
		if b.operations, err = parseOperation(*operation); err != nil {
			return err
		}
		if b.algorithms, err = parseAlgorithms(b.collectives); err != nil {
			return err
		}
		rows, err := b.run(p)
		if err != nil || !p.Leads() {
			return err
		}
		if err := b.report(cmd.OutOrStdout(), rows); err != nil {
			return err
		}
		if b.messages { // not the method of train with one rank a process
			return nil
		}
		fmt.Fprintln(cmd.ErrOrStderr(), KeepLinks(rows))
		return nil
	}
	return cmd
}

// counts returns the number of ranks, and how many of them share this host's memory.
func (b *commBench) counts(p *jobs.Place) (all, here int) {
	if p.Transport == cluster.InProc {
		return b.ranks, b.ranks
	}
	return p.Env.World * b.each, max(p.Env.LocalWorld, 1) * b.each
}

// fits rejects a largest buffer too short for an element of each rank, or too large for this host's
// memory: all of it is written before the measurements.
func (b *commBench) fits(p *jobs.Place) error {
	all, here := b.counts(p)
	least := int64(smallestBuffer)
	for least < 4*int64(all) {
		least *= 4
	}
	if b.most < least {
		return fmt.Errorf("--max-bytes %d: at least %d, with 4 bytes or more of each rank", b.most, least)
	}
	total := hostmem.Machine()
	share := total / int64(here)
	if total == 0 || b.most <= (share-algo.ScratchBytes)/2/4096*4096 {
		return nil
	}
	err := error(&spillway.MachineTooSmall{Ranks: here, Planned: min(b.most, math.MaxInt64/4/int64(here)) * 2 * int64(here), Total: total})
	fitting := int64(0)
	for size := int64(smallestBuffer); size <= (share-algo.ScratchBytes)/2; size *= 4 {
		fitting = size
	}
	if fitting < least {
		return fmt.Errorf("%w: two buffers of --max-bytes for each; start fewer ranks", err)
	}
	return fmt.Errorf("%w: two buffers of --max-bytes for each; --max-bytes %s fits", err, strings.ReplaceAll(plan.Bytes(fitting), " ", ""))
}

// benchWorld describes the ranks of this process in the measured job.
type benchWorld struct {
	size  int
	local []int
	world interface {
		Groups(rank int) (map[int]comm.Group, error)
	}
	mapped  func(rank int) func(graph.Space, int64) ([]byte, func() error, error)
	perHost int            // ranks of a host, where it is known
	peer    *mpi.Peer      // nil: none
	close   []func() error // in reverse
}

func (w *benchWorld) end() (err error) {
	for _, f := range slices.Backward(w.close) {
		err = errors.Join(err, f())
	}
	return err
}

// join connects this process with the other ranks.
func (b *commBench) join(p *jobs.Place) (w *benchWorld, err error) {
	w = &benchWorld{size: p.Env.World * b.each, perHost: p.Env.LocalWorld * b.each, mapped: func(int) func(graph.Space, int64) ([]byte, func() error, error) { return nil }}
	for i := range b.each {
		w.local = append(w.local, p.Env.Rank*b.each+i)
	}
	warn := func(text string) { fmt.Fprintln(p.Stderr, "warning:", cli.Flagged(text)) }
	switch p.Transport {
	case cluster.SHM:
		j, conns, err := launch.Inherited(p.Env)
		if err != nil {
			return nil, err
		}
		w.close = append(w.close, j.Close)
		for _, c := range conns {
			w.close = append(w.close, c.Close)
		}
		s, err := j.Join([]graph.Axis{{Name: "data", Size: w.size}}, w.local, shm.Options{Timeout: b.timeout, Warn: warn})
		if err != nil {
			return nil, errors.Join(err, w.end())
		}
		w.world, w.mapped, w.close = s, s.Map, append(w.close, s.Close)
	case cluster.MPI:
		process, err := mpi.Start(jobs.MpiFamilies(p.Env.Source), p.Env.Rank, p.Env.World, b.timeout)
		if err != nil {
			return nil, err
		}
		p.Close = process.Close
		w.close = append(w.close, func() error { return p.End(nil) })
		m, err := process.Join([]graph.Axis{{Name: "data", Size: w.size}}, len(w.local), mpi.Options{Timeout: b.timeout, Warn: warn, Messages: b.messages})
		if err != nil {
			return nil, errors.Join(err, w.end())
		}
		w.world, w.close = m, append(w.close, m.Close)
		if b.each > 1 { // the library's collectives connect processes, not ranks
			break
		}
		if w.peer, err = process.Peer(); err != nil {
			warn(err.Error())
			w.peer = nil
		}
	default:
		all := platform.OneProcess(b.ranks)
		w.size, w.local = all.Size, all.Local
		w.perHost = all.Size
		w.world, err = inproc.New([]graph.Axis{{Name: "data", Size: w.size}}, inproc.Options{Timeout: b.timeout})
	}
	return w, err
}

const smallestBuffer = 1 << 10

// run measures on all ranks of this process at once, and returns the rows of the first.
func (b *commBench) run(p *jobs.Place) (rows []CommRow, err error) {
	w, err := b.join(p)
	if err != nil {
		return nil, err
	}
	type end struct {
		rank int
		rows []CommRow
		err  error
	}
	ends := make(chan end, len(w.local))
	for _, r := range w.local {
		go func() {
			defer crash.Guard()
			rows, err := b.measure(w, r, p.Transport)
			ends <- end{r, rows, err}
		}()
	}
	for range w.local {
		e := <-ends
		err = errors.Join(err, e.err)
		if e.rank == w.local[0] {
			rows = e.rows
		}
	}
	return rows, cli.Fault(errors.Join(err, w.end()))
}

// measure measures all operations as one rank.
func (b *commBench) measure(w *benchWorld, rank int, transport string) (rows []CommRow, err error) {
	groups, err := w.world.Groups(rank)
	if err != nil {
		return nil, err
	}
	g := groups[-1]
	ctx := cpu.New(rank, cpu.Options{Map: w.mapped(rank)})
	g.OnError(ctx.Abort)
	ctx.OnError(g.Abort)
	defer func() { err = errors.Join(err, ctx.Close()) }()
	// A buffer, and another one for the result of an all-to-all.
	whole := (b.most + 4095) / 4096 * 4096
	scratch := int64(algo.ScratchBytes)
	arena, err := ctx.Alloc(graph.Device, 2*whole+scratch)
	if err != nil {
		return nil, err
	}
	s, err := ctx.NewStream(graph.Comm)
	if err != nil {
		return nil, err
	}
	mem, err := cpu.Slice[float32](device.Ptr{Arena: arena, Len: 2 * whole})
	if err != nil {
		return nil, err
	}
	for i := range mem {
		mem[i] = 1 // pages that were never written would be read too fast
	}
	m := &meter{g: g, s: s, arena: arena, apart: whole, scratch: device.Ptr{Arena: arena, Off: 2 * whole, Len: scratch}}
	copied, err := m.copies(mem, w.size)
	if err != nil {
		return nil, err
	}
	for size := int64(smallestBuffer); size <= b.most; size *= 4 {
		size := size / int64(4*w.size) * int64(4*w.size) // whole elements for each rank
		if size == 0 {
			continue
		}
		more, err := m.all(w, b.operations, b.algorithms, size)
		if err != nil {
			return nil, err
		}
		for _, row := range more {
			row.Transport, row.Ranks, row.CopyPerS = transport, w.size, copied
			row.Bound *= float64(w.size) / copied
			rows = append(rows, row)
		}
	}
	return rows, nil
}

// meter times operations of one rank.
type meter struct {
	g       comm.Group
	s       device.Stream
	arena   device.Arena
	apart   int64
	scratch device.Ptr
}

func (m *meter) ptr(off, n int64) device.Ptr { return device.Ptr{Arena: m.arena, Off: off, Len: n} }

func (m *meter) launch(k device.Kernel, err error) error {
	if err != nil {
		return err
	}
	return m.s.Launch(k)
}

// batches is the number of timed runs of an operation.
const batches = 5

// times returns the median of the durations that f returns. All ranks begin each call at once.
func (m *meter) times(f func() (time.Duration, error)) (time.Duration, error) {
	var took []time.Duration
	for i := range batches + 1 {
		if err := m.launch(m.g.Barrier("begin")); err != nil {
			return 0, err
		}
		if err := m.s.Sync(); err != nil {
			return 0, err
		}
		d, err := f()
		if err != nil {
			return 0, err
		}
		if i > 0 { // the first call maps pages and warms caches
			took = append(took, d)
		}
	}
	slices.Sort(took)
	return took[len(took)/2], nil
}

// copies measures the bytes a second, read and written, at which all ranks copy at once.
func (m *meter) copies(mem []float32, size int) (float64, error) {
	half := len(mem) / 2
	n := min(half, 16<<20)
	took, err := m.times(func() (time.Duration, error) {
		began := time.Now()
		copy(mem[half:half+n], mem[:n])
		return time.Since(began), nil
	})
	return float64(8*n*size) / took.Seconds(), err
}

// time measures an operation on a buffer of the given size. Bound in the result is the number of
// bytes that this rank loads and stores in one operation.
func (m *meter) time(g comm.Group, op comm.Op, bytes int64) (row CommRow, err error) {
	shard := bytes / int64(m.g.Size())
	full, own := m.ptr(0, bytes), m.ptr(int64(m.g.Rank())*shard, shard)
	var k device.Kernel
	switch op {
	case comm.AllReduce:
		k, err = g.AllReduce("measure", full, graph.F32, graph.SumTree)
	case comm.ReduceScatter:
		k, err = g.ReduceScatter("measure", full, m.ptr(m.apart, shard), graph.F32, graph.SumTree, false)
	case comm.AllGather:
		k, err = g.AllGather("measure", own, full, graph.F32)
	case comm.Broadcast:
		k, err = g.Broadcast("measure", full, graph.F32, 0)
	case comm.AllToAll:
		k, err = g.AllToAll("measure", full, m.ptr(m.apart, bytes), graph.F32)
	}
	if err != nil {
		return row, err
	}
	count := runsOf(bytes) // the same on every rank
	before := m.g.Stats()
	took, err := m.times(func() (time.Duration, error) {
		began := time.Now()
		for range count {
			if err := m.s.Launch(k); err != nil {
				return 0, err
			}
		}
		err := m.s.Sync()
		return time.Since(began), err
	})
	if err != nil {
		return row, err
	}
	moved := m.g.Stats().Sub(before)
	one := took.Seconds() / float64(count)
	return CommRow{Op: op, Bytes: bytes, Seconds: one, BytesPerS: float64(bytes) / one, Operations: count * batches,
		Bound: float64(moved.Read+moved.Written) / float64(count*(batches+1))}, nil
}

// report writes the rows as JSON if that is requested, and as a table.
func (b *commBench) report(out io.Writer, rows []CommRow) error {
	if err := cli.WriteJSON(out, b.json, rows); err != nil || b.json == "-" || len(rows) == 0 {
		return err
	}
	fmt.Fprintf(out, "%s, %d ranks; all copy at once at %.1f GB/s (read and written)\n", rows[0].Transport, rows[0].Ranks, rows[0].CopyPerS/1e9)
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "operation\tby\tbuffer\ttime\tGB/s\tbound by memory\ttime / bound\treckoned on a cluster\tMPI's own\ttime / MPI's own\t")
	for _, r := range rows {
		bound, over := "-", "-"
		if r.Bound > 0 && r.Transport != cluster.MPI {
			bound, over = micros(r.Bound), fmt.Sprintf("%.2f", r.Seconds/r.Bound)
		}
		reckoned, peer, against := "-", "-", "-"
		if r.Reckoned > 0 {
			reckoned = micros(r.Reckoned)
		}
		if r.Peer > 0 {
			peer, against = micros(r.Peer), fmt.Sprintf("%.2f", r.Seconds/r.Peer)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%.2f\t%s\t%s\t%s\t%s\t%s\t\n", r.Op, r.Algorithm, plan.Bytes(r.Bytes), micros(r.Seconds), r.BytesPerS/1e9, bound, over, reckoned, peer, against)
	}
	return t.Flush()
}

func micros(seconds float64) string { return fmt.Sprintf("%.1f µs", seconds*1e6) }

// parseAlgorithms parses --collectives.
func parseAlgorithms(list string) (names []algo.Name, err error) {
	if strings.EqualFold(list, "all") {
		return algorithm.Names[1:], nil
	}
	for s := range strings.SplitSeq(list, ",") {
		a, err := algorithm.Parse(strings.TrimSpace(s))
		if err != nil {
			return nil, fmt.Errorf("--collectives %w, or all", err)
		}
		if !slices.Contains(names, a) {
			names = append(names, a)
		}
	}
	return names, nil
}

// parseOperation parses --operation; "" means all.
func parseOperation(name string) ([]comm.Op, error) {
	if name == "" {
		return measured, nil
	}
	op := comm.Op(strings.ToLower(name))
	if !slices.Contains(measured, op) {
		return nil, fmt.Errorf("--operation %.80q: want all_reduce, reduce_scatter, all_gather, broadcast or all_to_all", name)
	}
	return []comm.Op{op}, nil
}

// runsOf returns how often a collective on a buffer of this size runs in one measurement. It is the
// same on every rank.
func runsOf(bytes int64) int { return int(min(max((16<<20)/max(bytes, 1), 1), 100)) }

var measured = []comm.Op{comm.AllReduce, comm.ReduceScatter, comm.AllGather, comm.Broadcast, comm.AllToAll}
