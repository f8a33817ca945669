package shm

import (
	"fmt"
	"strings"
	"time"
)

// begin records the start of an operation; it overwrites the oldest record.
func (a *rankArea) begin(k *kernel, call uint64) *record {
	n := a.flight.Load()
	r := &a.log[n%records]
	r.end.Store(0)
	r.begin.Store(now())
	r.call, r.bytes = call, k.Sig.Bytes
	r.text.set(k.text)
	a.flight.Store(n + 1)
	return r
}

// Flight describes the last operations of every rank, at most n each, oldest first. Any process
// of the job can call it, and it includes ranks that have died.
func (j *Job) Flight(n int) string {
	var s strings.Builder
	_ = j.know() // or it tells of the first rank of each process
	for r := range j.world {
		a := j.rank(r)
		state := [...]string{"not started", "running or dead", "ended"}[min(a.state.Load(), 2)]
		fmt.Fprintf(&s, "rank %d (process %d, %s): %d operations\n", r, j.pid(r), state, a.flight.Load())
		last := a.flight.Load()
		first := last - min(last, uint64(min(n, records)))
		for i := first; i < last; i++ {
			e := &a.log[i%records]
			fmt.Fprintf(&s, "  #%d %s, call %d, %d bytes, begun %v ago", i+1, e.text.String(), e.call, e.bytes, ago(e.begin.Load()))
			if end := e.end.Load(); end > 0 {
				fmt.Fprintf(&s, ", took %v\n", time.Duration(end-e.begin.Load()).Round(time.Microsecond))
			} else {
				s.WriteString(", not finished\n")
			}
		}
	}
	return s.String()
}

func ago(at int64) time.Duration { return time.Duration(now() - at).Round(time.Millisecond) }

// Failure returns the text of the error that ended the job, "" if there has been none.
func (j *Job) Failure() string {
	h := j.header()
	if h.ended.Load() != 2 {
		return ""
	}
	return string(h.text[:min(int(h.textLen), len(h.text))])
}
