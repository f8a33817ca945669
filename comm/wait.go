package comm

import "time"

// Wait measures, by polling, how long a rank has waited for others. A gap of more than twice Every
// between two polls means that the complete process paused (SIGSTOP, a sleeping laptop). The others
// could not run then either, so the gap counts as twice Every.
type Wait struct {
	Every   time.Duration // interval between two polls
	Counted time.Duration

	last time.Time
}

// NewWait starts a wait with a timeout.
func NewWait(timeout time.Duration) Wait {
	return Wait{Every: max(timeout/16, min(timeout, time.Millisecond)), last: time.Now()}
}

// Look polls: it adds the time since the last call.
func (w *Wait) Look() {
	now := time.Now()
	w.Counted += min(now.Sub(w.last), 2*w.Every)
	w.last = now
}
