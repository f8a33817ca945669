package mpi

import (
	"fmt"
	"strings"
	"sync"
	"time"
)

// flight records the rank's last operations.
type flight struct {
	mu   sync.Mutex
	n    int
	list [64]operation
}

type operation struct {
	text       string
	call       uint64
	bytes      int64
	begin, end time.Time
}

func (f *flight) begin(text string, call uint64, bytes int64) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	at := f.n
	f.list[at%len(f.list)] = operation{text: text, call: call, bytes: bytes, begin: time.Now()}
	f.n++
	return at
}

func (f *flight) end(at int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.list[at%len(f.list)].end = time.Now()
}

func (f *flight) tell(s *strings.Builder, who string, n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	fmt.Fprintf(s, "%s: %d operations\n", who, f.n)
	for i := max(0, f.n-min(n, len(f.list))); i < f.n; i++ {
		o := &f.list[i%len(f.list)]
		fmt.Fprintf(s, "  #%d %s, call %d, %d bytes, begun %v ago", i+1, o.text, o.call, o.bytes, time.Since(o.begin).Round(time.Millisecond))
		if o.end.IsZero() {
			s.WriteString(", not finished\n")
		} else {
			fmt.Fprintf(s, ", took %v\n", o.end.Sub(o.begin).Round(time.Microsecond))
		}
	}
}
