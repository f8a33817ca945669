package train

import (
	"math"

	"github.com/spillway-ml/spillway/exec"
)

// tellComm sets the use of collectives in r, if they were timed.
func (r *StepResult) tellComm(measured bool, u exec.Usage) {
	r.Overlap = math.NaN()
	if !measured {
		return
	}
	for i, k := range exec.CollectiveKinds {
		c := u.Collectives[i]
		r.Comm = append(r.Comm, CommUse{string(k), c.Calls, c.Bytes, c.Time.Seconds()})
	}
	if u.Busy > 0 {
		r.Overlap = u.Overlapped.Seconds() / u.Busy.Seconds()
	}
}
