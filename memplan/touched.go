package memplan

import "github.com/spillway-ml/spillway/graph"

// Touched returns, by memory space, the end (offset + 1) of the highest byte that the
// program's operations and the host touch when every section runs, on the rank with index
// coord[a] along each mesh axis a. It is less than Peak if no operand of that rank covers the
// end of the topmost buffer. p and l must be Assign's argument and result.
func Touched(p *graph.Program, l *Layout, coord []int) [graph.NumSpaces]int64 {
	var top [graph.NumSpaces]int64
	touch := func(id graph.BufID) {
		root, off := p.Resolve(id, coord)
		space := p.Buf(root).Space
		top[space] = max(top[space], l.Offset[root]+off+p.Buf(id).Bytes())
	}
	for i := range p.Sections {
		for j := range p.Sections[i].Phases {
			ph := &p.Sections[i].Phases[j]
			for k := range ph.Ops {
				if ph.Repeat > 0 {
					graph.Effects(&ph.Ops[k], func(e graph.Effect) { touch(e.Buf) })
				}
			}
		}
	}
	for _, id := range p.HostBuffers() {
		touch(id)
	}
	return top
}
