package bench

import (
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/algo"
	"github.com/spillway-ml/spillway/device/cpu"
)

// all measures every collective on a buffer of the given size with each algorithm that applies, and
// the MPI library's own.
func (m *meter) all(w *benchWorld, operations []comm.Op, algorithms []algo.Name, bytes int64) (rows []CommRow, err error) {
	perHost := 1
	if h := w.perHost; h > 0 && h&(h-1) == 0 && w.size%h == 0 {
		perHost = h
	}
	for _, op := range operations {
		for _, a := range algorithms {
			oneWay := op == comm.Broadcast || op == comm.AllToAll
			if oneWay && a != algorithms[0] || a == algo.Hierarchical && perHost == 1 {
				continue
			}
			if oneWay {
				a = algo.Direct
			}
			g, err := algo.Wrap(m.g, algo.Options{Algorithm: a, PerHost: perHost, Scratch: m.scratch, Link: algo.Cluster})
			if err != nil {
				return nil, err
			}
			row, err := m.time(g, op, bytes)
			if err != nil {
				return nil, err
			}
			row.Algorithm, row.perHost = a, perHost
			if !oneWay {
				name := a
				if a == algo.Auto {
					name = algo.Cluster.Best(op, w.size, perHost, bytes)
				}
				if row.Reckoned, err = algo.Cluster.Seconds(name, op, w.size, perHost, bytes); err != nil {
					return nil, err
				}
			}
			if w.peer != nil {
				if row.Peer, err = m.peer(w, op, bytes); err != nil {
					return nil, err
				}
			}
			rows = append(rows, row)
		}
	}
	return rows, nil
}

// peer times the MPI library's own collective in the same way as time.
func (m *meter) peer(w *benchWorld, op comm.Op, bytes int64) (float64, error) {
	send, err := cpu.Bytes(m.ptr(0, bytes))
	if err != nil {
		return 0, err
	}
	recv, err := cpu.Bytes(m.ptr(m.apart, bytes))
	if err != nil {
		return 0, err
	}
	count := runsOf(bytes)
	took, err := m.times(func() (time.Duration, error) { return w.peer.Run(op, send, recv, count) })
	return took.Seconds() / float64(count), err
}
