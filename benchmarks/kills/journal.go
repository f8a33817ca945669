package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"text/tabwriter"
)

// allRanks is the kill.Rank of a kill of all of a run's processes.
const allRanks = -1

// kill is the record of one kill.
type kill struct {
	Number        int    `json:"number"` // from 0
	Configuration string `json:"configuration"`
	Rank          int    `json:"rank"`  // rank of the killed process, in the order of the launcher's children
	Aimed         bool   `json:"aimed"` // at a save or a removal
	Amid          bool   `json:"amid"`  // a save or a removal was running: a temporary name was left
	Step          int    `json:"step"`  // of the newest checkpoint; 0 if there was none
	Lost          int    `json:"lost"`  // steps done after it
}

// journal keeps the kills of a campaign, in a file if it has one.
type journal struct {
	mu    sync.Mutex
	file  *os.File // nil: none
	kills map[int]kill
}

// openJournal reads the kills in a file, and its campaign's seed. A missing file is created with
// *seed. If *seed is 0, it is replaced by a random one, also without a file.
func openJournal(path string, seed *uint64) (*journal, error) {
	l := &journal{kills: map[int]kill{}}
	asked := *seed
	if *seed == 0 {
		*seed = rand.Uint64()
	}
	if path == "" {
		return l, nil
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o666)
	if err != nil {
		return nil, err
	}
	l.file = f
	lines := bufio.NewScanner(f)
	if !lines.Scan() {
		err := errors.Join(lines.Err(), json.NewEncoder(f).Encode(map[string]uint64{"seed": *seed}))
		return l, err
	}
	var head struct {
		Seed *uint64 `json:"seed"`
	}
	if err := json.Unmarshal(lines.Bytes(), &head); err != nil || head.Seed == nil {
		return nil, errors.Join(fmt.Errorf("%s is no log of kills: its first line has no seed", path), f.Close())
	}
	if asked != 0 && asked != *head.Seed {
		return nil, errors.Join(fmt.Errorf("%s is of seed %d, not %d", path, *head.Seed, asked), f.Close())
	}
	*seed = *head.Seed
	for n := 2; lines.Scan(); n++ {
		var k kill
		if err := json.Unmarshal(lines.Bytes(), &k); err != nil {
			return nil, errors.Join(fmt.Errorf("%s:%d: %w", path, n, err), f.Close())
		}
		l.kills[k.Number] = k
	}
	return l, lines.Err()
}

func (l *journal) has(i int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ok := l.kills[i]
	return ok
}

func (l *journal) len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.kills)
}

// add records a kill and returns the number of kills.
func (l *journal) add(k kill) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kills[k.Number] = k
	if l.file == nil {
		return len(l.kills), nil
	}
	return len(l.kills), json.NewEncoder(l.file).Encode(k)
}

func (l *journal) close() error {
	if l.file == nil {
		return nil
	}
	return l.file.Close()
}

// table prints a row for each configuration and kind of victim.
func (l *journal) table(to io.Writer, configs []*job) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := tabwriter.NewWriter(to, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "configuration\tkilled\tkills\taimed at saves\tamid a save or removal\tbefore the first checkpoint\tsteps lost, mean\tmost\t")
	for _, c := range configs {
		whole := []bool{true, false}
		if c.ranks == 0 {
			whole = whole[:1]
		}
		for _, all := range whole {
			var n row
			for _, k := range l.kills {
				if k.Configuration == c.name && (k.Rank == allRanks) == all {
					n.count(k)
				}
			}
			who := map[bool]string{true: "all", false: "one rank"}[all]
			fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%d\t%d\t%.1f\t%d\t\n", c.name, who, n.kills, n.aimed, n.amid, n.early, float64(n.lost)/float64(max(n.kills, 1)), n.most)
		}
	}
	return w.Flush()
}

// row sums up kills.
type row struct{ kills, aimed, amid, early, lost, most int }

func (r *row) count(k kill) {
	r.kills++
	if k.Aimed {
		r.aimed++
	}
	if k.Amid {
		r.amid++
	}
	if k.Step == 0 {
		r.early++
	}
	r.lost += k.Lost
	r.most = max(r.most, k.Lost)
}
