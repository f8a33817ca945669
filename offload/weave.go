package offload

import "github.com/spillway-ml/spillway/graph"

// weave edits a phase and tracks the copies that go through bounce buffers.
type weave struct {
	*graph.Editor
	bounces map[*graph.Node]*graph.Node // copy into a bounce buffer → copy out of it
	names   map[string]int
}

func newWeave(ph *graph.Phase) *weave {
	return &weave{Editor: graph.NewEditor(ph), names: map[string]int{}, bounces: map[*graph.Node]*graph.Node{}}
}

// commit writes the operations into the phase. It limits the number of bounce buffers in use at a
// time in each direction. With two, the disk uses one while the link to the device uses the other.
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
