package exec

import (
	"cmp"
	"slices"
	"sync"

	"github.com/spillway-ml/spillway/graph"
)

// Touched returns the end of the highest byte of a space's arena that an executed operation has
// touched; 0 for a space without an arena.
func (e *Executor) Touched(s graph.Space) int64 {
	if s >= graph.NumSpaces || e.arenas[s] == nil {
		return 0
	}
	return e.arenas[s].Touched()
}

// Classes are bytes by memory space and class.
type Classes = [graph.NumSpaces][graph.NumClasses]int64

// classes caches the result of TouchedClasses.
type classes struct {
	mu   sync.Mutex
	ran  int // number of operations that had run
	told Classes
	host []graph.BufID // buffers that are live at a peak but that no operation uses
}

// TouchedClasses returns, by class, the bytes that operations have touched in the buffers that the
// plan has live at each space's peak (memplan.SpaceUse.Live). Buffers that no operation uses belong
// to the host, such as the staging of states. The host's use of them depends on events between
// sections, not on the plan. They count up to the highest touched byte, as in Touched. The rest of
// Touched is counted as padding, so a space's classes sum to Touched. Once all operations of the
// peak have run, the classes equal the plan's SpaceUse.ByClass.
func (e *Executor) TouchedClasses() Classes {
	c := &e.classes
	c.mu.Lock()
	defer c.mu.Unlock()
	if ran := e.haveRun(); ran != c.ran || ran == 0 {
		c.ran = ran
		c.told, c.host = e.countClasses()
	}
	told := c.told
	for _, id := range c.host {
		b := e.cfg.Program.Buf(id)
		told[b.Space][b.Class] += min(max(0, e.Touched(b.Space)-e.cfg.Layout.Offset[id]), b.Bytes()-b.Pad)
	}
	for s := range graph.NumSpaces {
		sum := int64(0)
		for _, n := range told[s] {
			sum += n
		}
		told[s][graph.Padding] += max(0, e.Touched(s)-sum)
	}
	return told
}

// haveRun returns the number of operations that were enqueued at least once.
func (e *Executor) haveRun() (n int) {
	e.eachOp(func(o *operation) {
		if o.ran.Load() {
			n++
		}
	})
	return n
}

// extent is a range of bytes [from, to) of a buffer.
type extent struct{ from, to int64 }

// countClasses returns the bytes that operations have touched, and the live buffers that no
// operation uses.
func (e *Executor) countClasses() (sum Classes, host []graph.BufID) {
	p := e.cfg.Program
	touched := make([][]extent, len(p.Buffers)) // of live roots
	live, used := make([]bool, len(p.Buffers)), make([]bool, len(p.Buffers))
	for s := range graph.NumSpaces {
		for _, id := range e.cfg.Layout.Spaces[s].Live {
			live[id] = true
		}
	}
	e.eachOp(func(o *operation) {
		for _, id := range operands(o.op) {
			root, off := p.Resolve(id, e.cfg.Coord)
			used[root] = true
			if live[root] && o.ran.Load() {
				touched[root] = append(touched[root], extent{off, off + p.Buf(id).Bytes()})
			}
		}
	})
	for id, list := range touched {
		if live[id] && !used[id] {
			host = append(host, graph.BufID(id))
		}
		b := p.Buf(graph.BufID(id))
		sum[b.Space][b.Class] += min(covered(list), b.Bytes()-b.Pad)
	}
	return sum, host
}

// covered returns the number of bytes in at least one of the extents. It sorts list.
func covered(list []extent) (sum int64) {
	slices.SortFunc(list, func(x, y extent) int { return cmp.Compare(x.from, y.from) })
	end := int64(0)
	for _, x := range list {
		sum += max(0, x.to-max(x.from, end))
		end = max(end, x.to)
	}
	return sum
}
