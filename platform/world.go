package platform

import (
	"fmt"
	"slices"
)

// World is the number of ranks of a job and the ranks that this process runs.
type World struct {
	Size  int   // ranks of the job
	Local []int // this process's ranks, ascending
}

// OneProcess returns a world whose ranks are all in this process.
func OneProcess(size int) World {
	w := World{Size: size, Local: make([]int, size)}
	for i := range w.Local {
		w.Local[i] = i
	}
	return w
}

// Names lists consecutive ranks for a message: "rank 3", "ranks 2 to 3".
func Names(ranks []int) string {
	if len(ranks) == 1 {
		return fmt.Sprintf("rank %d", ranks[0])
	}
	return fmt.Sprintf("ranks %d to %d", ranks[0], ranks[len(ranks)-1])
}

// Check reports an invalid world: a process must run at least one rank, each must be in the
// world, and they must ascend.
func (w World) Check() error {
	if w.Size < 1 || len(w.Local) == 0 {
		return fmt.Errorf("world of %d rank(s), %d of them in this process: at least one is needed", w.Size, len(w.Local))
	}
	for i, r := range w.Local {
		if r < 0 || r >= w.Size || i > 0 && w.Local[i-1] >= r {
			return fmt.Errorf("world of %d rank(s): the ranks of this process are %v; they must ascend within 0 to %d", w.Size, w.Local, w.Size-1)
		}
	}
	return nil
}

// IsLocal reports whether this process runs a rank.
func (w World) IsLocal(rank int) bool {
	_, ok := slices.BinarySearch(w.Local, rank)
	return ok
}
