package watch_test

import (
	"fmt"
	"hash/fnv"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/internal/testkit/algotest"
)

const (
	interval = 100 * time.Millisecond
	silent   = time.Second
	timeout  = 10 * time.Second
	takes    = 30 * time.Millisecond // duration of one phase of an operation
)

// fault is a fault of one rank in one phase of its second operation.
type fault struct {
	what  string // "", stuck, slow, silent, dead, quit, mismatch
	rank  int
	phase watch.Phase
}

// job holds the ranks of a test: goroutines in virtual time that run collectives of the world with
// a transport's protocol.
type job struct {
	mu      sync.Mutex
	reports []watch.Report
	stop    chan struct{}
	ops     []comm.Op
	fault   fault
	beatAt  []time.Time // time of the last heartbeat, by rank
}

func (j *job) set(rank int, f func(*watch.Report)) {
	j.mu.Lock()
	f(&j.reports[rank])
	j.mu.Unlock()
}

// until waits until all reports satisfy is. It returns false if the job ends first.
func (j *job) until(is func(watch.Report) bool) bool {
	for {
		j.mu.Lock()
		all := !slices.ContainsFunc(j.reports, func(r watch.Report) bool { return !is(r) })
		j.mu.Unlock()
		if all {
			return true
		}
		select {
		case <-j.stop:
			return false
		case <-time.After(takes):
		}
	}
}

// strike triggers the fault if it belongs to this rank and phase, and reports whether the rank
// continues.
func (j *job) strike(rank int, call uint64, phase watch.Phase) bool {
	f := j.fault
	if f.rank != rank || f.phase != phase || call != 2 {
		return true
	}
	switch f.what {
	case "slow":
		time.Sleep(timeout - silent)
		return true
	case "", "mismatch":
		return true
	case "dead":
		j.set(rank, func(r *watch.Report) { r.State = watch.Dead })
	case "quit":
		j.set(rank, func(r *watch.Report) { r.State, r.In[0].Phase = watch.Done, watch.Idle })
	}
	return false
}

func (j *job) rank(rank int) {
	beats := make(chan struct{})
	defer func() { <-beats }()
	go func() { // the process's heartbeat
		defer close(beats)
		for {
			j.set(rank, func(r *watch.Report) {
				struck := r.In[0].Call == 2 && r.In[0].Phase == j.fault.phase || r.In[0].Call == 1 && r.In[0].Phase == watch.Idle && j.fault.phase == watch.Idle
				if j.fault.what != "silent" || j.fault.rank != rank || !struck {
					r.Beat++
					j.beatAt[rank] = time.Now()
				}
			})
			select {
			case <-j.stop:
				return
			case <-time.After(interval):
			}
		}
	}()
	for i, op := range j.ops {
		call := uint64(i + 1)
		to := func(p watch.Phase) bool {
			j.set(rank, func(r *watch.Report) {
				h := fnv.New64()
				fmt.Fprint(h, op)
				if j.fault == (fault{"mismatch", rank, p}) && call == 2 {
					fmt.Fprint(h, "of another size")
				}
				if p != watch.Idle {
					r.In[0].Call = call
				}
				if p == watch.Waiting {
					r.In[0].Sig, r.In[0].Op = h.Sum64(), fmt.Sprintf("%s %q", op, "op")
				}
				r.In[0].Phase = p
			})
			time.Sleep(takes)
			return j.strike(rank, call, p)
		}
		arrived := func(r watch.Report) bool { return r.In[0].Call > call || r.In[0].Call == call }
		moved := func(r watch.Report) bool {
			return r.In[0].Call > call || r.In[0].Call == call && (r.In[0].Phase == watch.Leaving || r.In[0].Phase == watch.Idle)
		}
		if !j.strike(rank, call, watch.Idle) ||
			!to(watch.Waiting) || !j.until(arrived) || !to(watch.Moving) || !to(watch.Leaving) || !j.until(moved) {
			return
		}
		j.set(rank, func(r *watch.Report) { r.In[0].Phase = watch.Idle })
	}
	j.set(rank, func(r *watch.Report) { r.State = watch.Done })
}

type outcome struct {
	verdicts []watch.Verdict
	took     time.Duration // until the end
	// From the last heartbeat of the faulty rank until it was named, and until the end.
	named, quiet time.Duration
}

func run(world int, ops []comm.Op, f fault) (out outcome) {
	j := &job{stop: make(chan struct{}), ops: ops, fault: f, beatAt: make([]time.Time, world)}
	all := watch.Group{Name: "world"}
	for r := range world {
		j.reports = append(j.reports, watch.Report{State: watch.Alive, In: make([]watch.Progress, 1)})
		all.Ranks = append(all.Ranks, r)
	}
	m := watch.New(watch.Config{World: world, Groups: []watch.Group{all}, Interval: interval, Silent: silent, Timeout: timeout})
	began := time.Now()
	var ranks, watcher sync.WaitGroup
	for r := range world {
		ranks.Go(func() { j.rank(r) })
	}
	over := make(chan struct{})
	watcher.Go(func() {
		algotest.Watch(m, world, interval, over, func(reports []watch.Report) {
			j.mu.Lock()
			defer j.mu.Unlock()
			for i, r := range j.reports {
				r.In = slices.Clone(r.In)
				reports[i] = r
			}
		}, func(v watch.Verdict) {
			out.verdicts = append(out.verdicts, v)
			j.mu.Lock()
			since := time.Since(j.beatAt[f.rank])
			j.mu.Unlock()
			if v.Kind == watch.Named {
				out.named = since
			}
			if v.Kind == watch.End {
				out.quiet = since
				out.took = time.Since(began)
				close(j.stop)
			}
		})
	})
	go func() { // a job without a fault, or with a slow rank, ends normally
		time.Sleep(timeout + timeout/2)
		close(over)
	}()
	watcher.Wait()
	<-over
	select {
	case <-j.stop:
	default:
		close(j.stop)
	}
	ranks.Wait()
	return out
}

// Every collective, rank and phase is combined with each fault: stuck, slow, silent, dead, ended
// and mismatched. The job must end, except with a slow rank, and its error must name the rank.
func TestEveryFaultEndsTheJobAndNamesItsRank(t *testing.T) {
	collectives := []comm.Op{comm.AllGather, comm.ReduceScatter, comm.AllReduce, comm.Broadcast, comm.AllToAll, comm.Barrier}
	phases := []watch.Phase{watch.Idle, watch.Waiting, watch.Moving, watch.Leaving}
	for _, op := range collectives {
		for world := 2; world <= 4; world++ {
			for rank := range world {
				for _, phase := range phases {
					for _, what := range []string{"stuck", "slow", "silent", "dead", "quit", "mismatch"} {
						if what == "mismatch" && phase != watch.Waiting {
							continue // an operation is reported when the rank arrives
						}
						synctest.Test(t, func(t *testing.T) {
							f := fault{what, rank, phase}
							got := run(world, []comm.Op{comm.Barrier, op, comm.Barrier}, f)
							check(t, fmt.Sprintf("%s, %d ranks: %+v", op, world, f), f, got)
						})
					}
				}
			}
		}
	}
}

func check(t *testing.T, name string, f fault, got outcome) {
	if f.what == "slow" {
		require.Empty(t, got.verdicts, name)
		return
	}
	require.NotEmpty(t, got.verdicts, name)
	end := got.verdicts[len(got.verdicts)-1]
	require.Equal(t, watch.End, end.Kind, name)
	require.Contains(t, end.Ranks, f.rank, "%s: %s", name, end.Text)
	require.Contains(t, end.Text, fmt.Sprintf("rank %d", f.rank), name)
	const before = time.Second + 2*takes // the operations before the fault
	switch f.what {
	case "stuck":
		require.ErrorIs(t, end.Err, comm.ErrTimeout, name)
		require.GreaterOrEqual(t, got.took, timeout, name)
		require.Less(t, got.took, timeout+before, name)
		require.Len(t, got.verdicts, 1, "%s: a rank that beats is not named as silent", name)
	case "silent":
		require.ErrorIs(t, end.Err, comm.ErrTimeout, name)
		require.Less(t, got.took, timeout+before, name)
		first := got.verdicts[0]
		require.Equal(t, watch.Named, first.Kind, name)
		require.Equal(t, []int{f.rank}, first.Ranks, "%s: %s", name, first.Text)
		// The next check sees a heartbeat, and the one after that its absence.
		require.LessOrEqual(t, got.named, silent+2*interval, "%s: named within 2 s", name)
		require.LessOrEqual(t, got.quiet, timeout+2*interval, "%s: ended at the timeout", name)
	case "dead", "quit":
		require.ErrorIs(t, end.Err, comm.ErrLost, name)
		require.Less(t, got.took, before, name)
	case "mismatch":
		require.ErrorIs(t, end.Err, comm.ErrMismatch, name)
		require.Less(t, got.took, before, name)
	}
}

func TestASoundJobHasNoVerdict(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		require.Empty(t, run(4, []comm.Op{comm.AllReduce, comm.AllGather, comm.Barrier}, fault{}).verdicts)
	})
}

// pair returns a watchdog for two live ranks, their reports, and a function that advances its
// clock.
func pair(t *testing.T) (*watch.Machine, []watch.Report, func(gap time.Duration, beating ...int) []watch.Verdict) {
	m := watch.New(watch.Config{World: 2, Groups: []watch.Group{{Name: "world", Ranks: []int{0, 1}}}, Interval: interval, Silent: silent, Timeout: timeout,
		Where: func(r int) string { return fmt.Sprintf("host h%d", r) }})
	reports := []watch.Report{{State: watch.Alive, In: make([]watch.Progress, 1)}, {State: watch.Alive, In: make([]watch.Progress, 1)}}
	var now time.Duration
	return m, reports, func(gap time.Duration, beating ...int) []watch.Verdict {
		now += gap
		for _, r := range beating {
			reports[r].Beat++
		}
		return m.Observe(now, reports)
	}
}

// If the whole job is paused, it continues afterwards: a rank's silence does not count while the
// watchdog did not run.
func TestAPauseOfTheWholeJobCountsForNothing(t *testing.T) {
	_, reports, step := pair(t)
	reports[0].In[0] = watch.Progress{Call: 1, Phase: watch.Waiting, Op: "barrier"}
	require.Empty(t, step(0, 0, 1))
	require.Empty(t, step(interval, 0, 1))
	for range 5 {
		require.Empty(t, step(24*time.Hour, 0, 1), "the lid was closed for a day")
		require.Empty(t, step(interval, 0, 1))
	}
}

func TestASilentRankIsNamedOnceAndMayComeBack(t *testing.T) {
	m, _, step := pair(t)
	step(0, 0, 1)
	var named []watch.Verdict
	for range 15 {
		named = append(named, step(interval, 0)...)
	}
	require.Len(t, named, 1)
	require.Equal(t, "rank 1 (host h1) gives no sign of life; the job ends in 9s unless it comes back", named[0].Text)
	alive := []watch.Report{{State: watch.Alive}, {State: watch.Alive}}
	require.Equal(t, 0, m.Speaker(alive))
	alive[0].State = watch.Done
	require.Equal(t, -1, m.Speaker(alive), "rank 1 is silent")
	require.Equal(t, []watch.Verdict{{Kind: watch.Back, Ranks: []int{1}, Text: "rank 1 (host h1) is back"}}, step(interval, 0, 1))
	require.Equal(t, 1, m.Speaker(alive))
}

func TestARankThatNeverJoins(t *testing.T) {
	_, reports, step := pair(t)
	reports[1].State = watch.Absent
	var got []watch.Verdict
	for range 200 {
		got = append(got, step(interval, 0)...)
	}
	require.Len(t, got, 1)
	require.EqualError(t, got[0].Err, "timeout: rank 1 (host h1) has not joined the job within 10s")
}

func TestASendThatNobodyReceives(t *testing.T) {
	_, reports, step := pair(t)
	reports[0].Point, reports[0].Peer = watch.Progress{Call: 1, Phase: watch.Waiting, Op: `send_recv "x"`}, 1
	reports[1].In[0] = watch.Progress{Call: 4, Phase: watch.Waiting, Op: `all_reduce "y"`}
	var got []watch.Verdict
	for range 200 {
		got = append(got, step(interval, 0, 1)...)
	}
	require.Len(t, got, 1)
	require.ErrorIs(t, got[0].Err, comm.ErrTimeout)
	require.Contains(t, got[0].Text, "rank")

	_, reports, step = pair(t)
	reports[0].Point, reports[0].Peer = watch.Progress{Call: 1, Phase: watch.Waiting, Op: `send_recv "x"`}, 1
	reports[1].State = watch.Done
	got = nil
	for range 10 {
		require.Empty(t, got, "the one who came first may be gone already")
		got = step(interval, 0)
	}
	for range 10 {
		got = append(got, step(interval, 0)...)
	}
	require.Len(t, got, 1)
	require.EqualError(t, got[0].Err, `rank lost: rank 1 (host h1) has ended; rank 0 waits in send_recv "x"`)

	_, reports, step = pair(t)
	reports[0].Point, reports[0].Peer = watch.Progress{Call: 1, Phase: watch.Leaving, Op: `send_recv "x"`}, 1
	reports[1].State = watch.Done
	for range 50 {
		require.Empty(t, step(interval, 0), "both have moved: it only has to look")
	}
}
