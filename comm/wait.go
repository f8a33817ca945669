package comm

import "time"

// Wait counts how long somebody has waited for others, look by look. A gap between two
// looks of more than twice Every is a pause of the whole process (SIGSTOP, a laptop that
// sleeps): the others had no time to come then either, and it counts as that much.
type Wait struct {
	Every   time.Duration // between two looks
	Counted time.Duration

	last time.Time
}

// NewWait begins a wait that is to end after a timeout.
func NewWait(timeout time.Duration) Wait {
	return Wait{Every: max(timeout/16, min(timeout, time.Millisecond)), last: time.Now()}
}

// Look counts what has gone by.
func (w *Wait) Look() {
	now := time.Now()
	w.Counted += min(now.Sub(w.last), 2*w.Every)
	w.last = now
}
