package launch

// Team tracks the processes of an elastic job, which continues after it loses some. It does no I/O;
// it computes how many ranks the job can have.
//
//	4 ranks ── one lost ──→ 3 continue, 1 is started ── a checkpoint ──→ 4
//
// The step stays the same: its ranks share the micro-batches, evenly unless Uneven is set. A
// replacement process joins at the next checkpoint, or at once if fewer than Min processes are
// left.
type Team struct {
	Leaves   int  // micro-batches of a step, over all ranks
	Uneven   bool // the number of ranks need not divide Leaves; each rank has at least one
	Min, Max int  // number of ranks
	Restarts int  // how many more processes may be started

	Processes int // processes that can run a rank
	Joining   int // replacements that were started and are not ranks yet
}

// Lose records the loss of n processes, and of the replacements started, as far as allowed.
func (t *Team) Lose(n int) {
	t.Processes -= min(n, t.Processes)
	more := max(0, min(n, t.Restarts, t.Max-t.Processes-t.Joining))
	t.Restarts -= more
	t.Joining += more
	if len(t.Sizes()) == 0 {
		t.Join()
	}
}

// Join makes the replacements part of the job.
func (t *Team) Join() { t.Processes, t.Joining = t.Processes+t.Joining, 0 }

// Sizes lists the world sizes that are possible now, the largest first.
func (t *Team) Sizes() (list []int) { return t.sizes(t.Processes) }

func (t *Team) sizes(processes int) (list []int) {
	for n := min(processes, t.Max, t.Leaves); n >= max(t.Min, 1); n-- {
		if t.Uneven || t.Leaves%n == 0 {
			list = append(list, n)
		}
	}
	return list
}

// Grows says whether a job of the given number of ranks would be larger with the replacements.
func (t *Team) Grows(ranks int) bool {
	all := t.sizes(t.Processes + t.Joining)
	return t.Joining > 0 && len(all) > 0 && all[0] > ranks
}
