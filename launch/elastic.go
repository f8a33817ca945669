package launch

// Team is the processes of a job that goes on when it loses some: a pure machine,
// which says how many ranks it is formed of.
//
//	4 ranks ── one lost ──→ 3 go on, 1 is started ── a checkpoint ──→ 4
//
// The step stays the same: its ranks share the micro-batches, evenly unless Uneven. What was
// started for a lost process joins at the next checkpoint, or at once where those that are
// left are fewer than Min.
type Team struct {
	Leaves   int  // micro-batches of a step
	Uneven   bool // ranks need not divide them; each has at least one
	Min, Max int  // ranks
	Restarts int  // processes that may still be started

	Processes int // that may run a rank
	Joining   int // started for lost ones, and not ranks yet
}

// Lose takes the loss of n processes, and has one started for each while it may.
func (t *Team) Lose(n int) {
	t.Processes -= min(n, t.Processes)
	more := max(0, min(n, t.Restarts, t.Max-t.Processes-t.Joining))
	t.Restarts -= more
	t.Joining += more
	if len(t.Sizes()) == 0 {
		t.Join()
	}
}

// Join makes what was started part of the job.
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

// Grows tells whether a job of so many ranks would be larger with what is joining.
func (t *Team) Grows(ranks int) bool {
	all := t.sizes(t.Processes + t.Joining)
	return t.Joining > 0 && len(all) > 0 && all[0] > ranks
}
