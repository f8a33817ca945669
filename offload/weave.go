package offload

import "github.com/spillway-ml/spillway/graph"

// weave edits a phase and knows which copies go through bounce buffers.
type weave struct {
	*graph.Editor
	bounces map[*graph.Node]*graph.Node // the copy into a bounce buffer → the one out of it
	names   map[string]int
}

func newWeave(ph *graph.Phase) *weave {
	return &weave{Editor: graph.NewEditor(ph), names: map[string]int{}, bounces: map[*graph.Node]*graph.Node{}}
}

// commit puts the operations into the phase. At most so many bounce buffers a
// direction are full at a time: with two, the disk works on one while the link to
// the device empties or fills the other.
func (w *weave) commit(buffers int) {
	drains := map[graph.StreamID][]*graph.Node{} // by the stream that fills
	for _, n := range w.Nodes() {
		if out := w.bounces[n]; out != nil {
			d := drains[n.Op.Stream]
			if k := len(d) - buffers; k >= 0 {
				w.Throttle(d[k], n)
			}
			drains[n.Op.Stream] = append(d, out)
		}
	}
	w.Commit()
}
