package memplan

import "github.com/spillway-ml/spillway/graph"

// Touched returns, by memory space, the highest byte (its offset + 1) that the
// program's operations and the host touch on the rank with index coord[a] along
// each mesh axis a, when every section runs. An arena that is Peak bytes large
// and used to its last byte has the two equal; a buffer at the top whose end no
// operand of that rank covers is what makes them differ. p and l must be what
// Assign took and returned.
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
