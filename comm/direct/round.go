package direct

import "github.com/spillway-ml/spillway/graph"

// bindRound prepares the rank's part of one round of an algorithm.
func (m *Mover) bindRound() error {
	dtype := m.call.Sig.DType
	size, moves := dtype.Size(), m.call.Round[m.rank]
	var adder *Adder
	for _, v := range moves {
		if len(v.From) < 2 {
			continue
		}
		var err error
		if adder, err = NewAdder(dtype, graph.SumTree, len(m.Peers)); err != nil {
			return err
		}
	}
	srcs := make([][]byte, 0, len(m.Peers))
	m.move = func(m *Mover) (read, written int64) {
		for _, v := range moves {
			from, to := v.At*size, (v.At+v.Len)*size
			dst := m.Peers[m.rank].Out[from:to]
			srcs = srcs[:0]
			for _, r := range v.From {
				srcs = append(srcs, m.Peers[r].Out[from:to])
			}
			if len(srcs) == 1 {
				copy(dst, srcs[0])
			} else {
				adder.Sum(dst, srcs, false)
			}
			read, written = read+int64(len(srcs))*(to-from), written+to-from
		}
		return read, written
	}
	return nil
}
