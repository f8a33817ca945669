package mpi

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/comm/world"
	"github.com/spillway-ml/spillway/internal/crash"
)

const (
	beatEvery   = 100 * time.Millisecond
	silentAfter = 1200 * time.Millisecond
)

// letter is the buffer of a heartbeat message to or from a peer.
type letter struct {
	peer   int
	memory []byte
	x      *exchange // the pending message; nil: none
	last   bool      // it is the last message to or from this peer
}

// monitor sends heartbeats, receives those of the other processes, and watches all ranks.
func (w *World) monitor() {
	defer crash.Guard()
	defer close(w.stopped)
	m := watch.New(watch.Config{World: w.size, Groups: w.groups, Interval: beatEvery, Silent: silentAfter, Timeout: w.timeout, Where: w.where})
	out, in, err := w.letters()
	if err != nil {
		_ = w.fail(err)
		return
	}
	reports := make([]watch.Report, w.size)
	began := time.Now()
	tick := time.NewTicker(beatEvery)
	defer tick.Stop()
	told := false
	for {
		w.hearAll(in)
		w.mu.Lock()
		for i := range w.own.Reports {
			w.own.Reports[i].Beat++
		}
		for r := range reports {
			of := &w.beatOf(r).Reports[r%w.each]
			reports[r] = *of
			reports[r].In = append([]watch.Progress(nil), of.In...)
		}
		w.mu.Unlock()
		for _, v := range m.Observe(time.Since(began), reports) {
			switch {
			case v.Kind == watch.End:
				_ = w.fail(v.Err)
			case m.Speaker(reports) == w.first:
				w.warn(v.Text)
			}
		}
		w.beatAll(out)
		over := w.over
		if told {
			over = nil
		}
		select {
		case <-tick.C:
		case <-over:
			told = true // and send it to the others at once
		case <-w.stop:
			w.part(out, in)
			return
		}
	}
}

func (w *World) where(r int) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	b := w.beatOf(r)
	if b.Host == "" {
		return "not heard of yet"
	}
	return fmt.Sprintf("host %s, process %d", b.Host, b.PID)
}

// beatOf returns the last heartbeat of a rank's process; the caller holds mu.
func (w *World) beatOf(rank int) *beat {
	if p := rank / w.each; p != w.engine.rank {
		return &w.peers[p]
	}
	return &w.own
}

// letters allocates the buffers of heartbeats to and from each peer.
func (w *World) letters() (out, in []*letter, err error) {
	for r := range w.engine.world {
		if r == w.engine.rank {
			continue
		}
		size := beatBytes * w.each
		both, err := offHeap(2 * size)
		if err != nil {
			return nil, nil, err
		}
		out, in = append(out, &letter{peer: r, memory: both[:size]}), append(in, &letter{peer: r, memory: both[size:]})
	}
	return out, in, nil
}

// over tells whether the letter has no pending message.
func (l *letter) over() (bool, error) {
	if l.x == nil {
		return true, nil
	}
	select {
	case err := <-l.x.done:
		l.x = nil
		return true, err
	default:
		return false, nil
	}
}

// hearAll processes the heartbeats that have arrived. It ignores a failed message: the
// watchdog notices that the peer is silent.
func (w *World) hearAll(in []*letter) {
	for _, l := range in {
		first := l.x == nil
		done, err := l.over()
		if !done || l.last {
			continue
		}
		if !first && err == nil {
			l.last = w.hear(l.peer, l.memory)
		}
		if !l.last {
			l.x = w.engine.begin([]transfer{{peer: l.peer, tag: tagBeat, mem: l.memory}}, true)
		}
	}
}

// encode encodes the heartbeat as a message.
func (w *World) encode(to []byte) {
	w.mu.Lock()
	text, err := json.Marshal(w.own)
	w.mu.Unlock()
	if err != nil || len(text) > len(to)-4 {
		text = []byte("{}")
	}
	binary.LittleEndian.PutUint32(to, uint32(len(text)))
	copy(to[4:], text)
}

// hear processes a heartbeat. done says that it is the process's last one.
func (w *World) hear(process int, message []byte) (done bool) {
	n := binary.LittleEndian.Uint32(message)
	var b beat
	if int(n) > len(message)-4 || json.Unmarshal(message[4:4+n], &b) != nil || len(b.Reports) != w.each {
		return false // damaged: does not count as a sign of life
	}
	for _, r := range b.Reports {
		if len(r.In) != len(w.members) {
			return false
		}
	}
	w.mu.Lock()
	w.peers[process] = b
	w.mu.Unlock()
	if b.Err != "" && w.Err() == nil {
		_ = w.fail(world.Told(b.Kind, b.Err))
	}
	return b.Reports[0].State == watch.Done
}

// beatAll sends a heartbeat to each peer that has received the previous one.
func (w *World) beatAll(out []*letter) {
	for _, l := range out {
		if done, _ := l.over(); !done || l.last {
			continue
		}
		w.encode(l.memory)
		l.x = w.engine.begin([]transfer{{send: true, peer: l.peer, tag: tagBeat, mem: l.memory}}, true)
	}
}

// part tells the peers that this process has ended and waits until they have ended too, so
// that no message is pending when MPI is finalized.
func (w *World) part(out, in []*letter) {
	deadline := time.Now().Add(w.process.grace())
	w.mu.Lock()
	for i := range w.own.Reports {
		w.own.Reports[i].State = watch.Done
	}
	w.mu.Unlock()
	for left := true; left && time.Now().Before(deadline); {
		left = false
		for _, l := range out {
			done, _ := l.over()
			switch {
			case done && !l.last:
				l.last, left = true, true
				w.encode(l.memory)
				l.x = w.engine.begin([]transfer{{send: true, peer: l.peer, tag: tagBeat, mem: l.memory}}, true)
			case !done:
				left = true
			}
		}
		w.hearAll(in)
		for _, l := range in {
			left = left || !l.last
		}
		if left {
			time.Sleep(5 * time.Millisecond)
		}
	}
	missing := map[int]bool{}
	for _, l := range append(out, in...) {
		if !l.last || l.x != nil {
			missing[l.peer] = true
		}
	}
	w.leaveWithout(slices.Sorted(maps.Keys(missing)))
}

// leaveWithout makes Close skip MPI_Finalize because the given processes have not ended in
// time.
func (w *World) leaveWithout(processes []int) {
	if len(processes) == 0 {
		return
	}
	first := processes[0] * w.each
	who := fmt.Sprintf("rank %d (%s)", first, w.where(first))
	if n := len(processes) - 1; n > 0 {
		who += fmt.Sprintf(" and %d more of the processes", n)
	}
	w.process.leave(fmt.Sprintf("%s did not come to the end within %v", who, w.process.grace()))
}

// Flight describes the last operations of this process's ranks, at most n each, oldest
// first.
func (w *World) Flight(n int) string {
	var s strings.Builder
	for i := range w.flights {
		rank := w.first + i
		w.flights[i].tell(&s, fmt.Sprintf("rank %d (%s)", rank, w.where(rank)), n)
	}
	return s.String()
}
