package layouts

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan"
)

// barColumns is the largest number of columns; in longer sections several steps share one.
const barColumns = 120

// Bars draws when each buffer's bytes are in use. For each memory space and section it prints
// one line a buffer, ordered by offset, and one column a step in program order. With more than
// 120 steps several share a column. A phase that is repeated occurs twice.
//
//	W  written    R  read    X  both (accumulated, in place, or in one column)
//	=  holds contents that a later step reads        .  free for others
//	|  lives all the time
//
//	device  peak 1024, bound 1024 at step/main/b
//	  step: main×1 = a b c
//	    offset      end  class        buffer
//	         0      512  parameters   w        |RR
//	       512     1024  activations  x        WR.
//
// It fails where memplan.Assign fails, if the layout belongs to another program, and if out fails.
func Bars(p *graph.Program, l *memplan.Layout, out io.Writer) error {
	if len(l.Offset) != len(p.Buffers) {
		return fmt.Errorf("layouts.Bars: the layout has %d offsets, want one for each of the program's %d buffers", len(l.Offset), len(p.Buffers))
	}
	regions, err := graph.NewRegions(p)
	if err != nil {
		return fmt.Errorf("layouts.Bars: %w", err)
	}
	w := bufio.NewWriter(out)
	for sp, use := range l.Spaces {
		if use.Peak == 0 {
			continue
		}
		fmt.Fprintf(w, "%v  peak %d, bound %d at %s\n", graph.Space(sp), use.Peak, use.LowerBound, use.PeakAt)
		for i := range p.Sections {
			if err := sectionBars(w, p, l, regions, graph.Space(sp), &p.Sections[i]); err != nil {
				return fmt.Errorf("layouts.Bars: %w", err)
			}
		}
	}
	return w.Flush()
}

func sectionBars(w io.Writer, p *graph.Program, l *memplan.Layout, regions *graph.Regions, sp graph.Space, s *graph.Section) error {
	t, err := graph.NewTrace(p, regions, s)
	if err != nil {
		return err
	}
	per := max(1, (len(t.Steps)+barColumns-1)/barColumns)
	columns := (len(t.Steps) + per - 1) / per
	rows := map[graph.BufID][]byte{}
	row := func(id graph.BufID, blank byte) []byte {
		if rows[id] == nil {
			rows[id] = []byte(strings.Repeat(string(blank), columns))
		}
		return rows[id]
	}
	for id := range p.Buffers {
		if l.Offset[id] >= 0 && p.Buffers[id].Life == graph.LifeRun && p.Buffers[id].Space == sp {
			row(graph.BufID(id), '|')
		}
	}
	for _, r := range t.LiveRanges() {
		if p.Buf(r.Buf).Space == sp {
			bar := row(r.Buf, '.')
			last := int(r.Steps[len(r.Steps)-1])
			if r.Kept {
				last = len(t.Steps) - 1
			}
			for c := int(r.Steps[0]) / per; c <= last/per; c++ {
				bar[c] = '='
			}
		}
	}
	for i := range t.Steps {
		graph.Effects(t.Op(i), func(e graph.Effect) {
			root := regions.Of[e.Buf].Root
			if p.Buf(root).Space != sp {
				return
			}
			mark := byte('R')
			if e.Write {
				mark = 'W'
			}
			at := &row(root, '.')[i/per]
			if e.Read && e.Write || *at == 'X' || *at == 'R' && mark == 'W' || *at == 'W' && mark == 'R' {
				mark = 'X'
			}
			*at = mark
		})
	}
	if len(rows) == 0 {
		return nil
	}
	fmt.Fprintf(w, "  %s:", s.Name)
	for i := range s.Phases {
		ph := &s.Phases[i]
		fmt.Fprintf(w, " %s×%d", ph.Name, ph.Repeat)
		if per == 1 {
			fmt.Fprint(w, " =")
			for k := range ph.Ops {
				fmt.Fprintf(w, " %s", ph.Ops[k].Name)
				if st := ph.Ops[k].Stream; st != graph.Compute {
					fmt.Fprintf(w, "@%v", st)
				}
			}
		}
	}
	fmt.Fprintln(w)
	var ids []graph.BufID
	widest := len("buffer")
	for id := range rows {
		ids = append(ids, id)
		widest = max(widest, len(p.Buf(id).Name))
	}
	slices.SortFunc(ids, func(x, y graph.BufID) int {
		if c := cmp.Compare(l.Offset[x], l.Offset[y]); c != 0 {
			return c
		}
		return cmp.Compare(x, y)
	})
	fmt.Fprintf(w, "    %10s %10s  %-13s  %s\n", "offset", "end", "class", "buffer")
	for _, id := range ids {
		b := p.Buf(id)
		fmt.Fprintf(w, "    %10d %10d  %-13v  %-*s  %s\n", l.Offset[id], l.Offset[id]+b.Bytes(), b.Class, widest, b.Name, rows[id])
	}
	return nil
}
