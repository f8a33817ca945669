package exec

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// The overlap of two lists of spans equals the number of instants at which both have something
// running.
func TestOverlapInstantByInstant(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const end = 60
		draw := func(streams int, name string) (list []ranSpan, busy [end]bool) {
			for range streams {
				for at := 0; at < end-4; {
					from := at + rapid.IntRange(0, 9).Draw(t, name+" pause")
					to := min(from+rapid.IntRange(0, 9).Draw(t, name), end)
					list = append(list, ranSpan{start: time.Duration(from), end: time.Duration(to)})
					for i := from; i < to; i++ {
						busy[i] = true
					}
					at = max(to, at+1)
				}
			}
			return list, busy
		}
		talk, talking := draw(1, "comm")
		work, working := draw(2, "compute")
		both := 0
		for i := range talking {
			if talking[i] && working[i] {
				both++
			}
		}
		require.EqualValues(t, both, common(talk, union(work)))
	})
}

// RunPhase enqueues a phase once and returns without waiting for it.
func (e *Executor) RunPhase(sectionName, phaseName string) error {
	s, err := e.section(sectionName)
	if err != nil {
		return err
	}
	for i := range s.phases {
		if s.phases[i].graph.Name == phaseName {
			e.current.Store(s)
			return e.enqueue(s.phases[i].ops)
		}
	}
	return fmt.Errorf("exec: rank %d: section %s has no phase %q", e.rank, sectionName, phaseName)
}
