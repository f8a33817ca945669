package nccl

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"
	"unsafe"

	"github.com/spillway-ml/spillway/comm/world"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/watch"
)

// rounds exchanges blocks with the peers in rounds until all have left or the job has ended.
func (h *Host) rounds() {
	if h.world == 1 { // no peers
		<-h.leaving
		return
	}
	for {
		busy, left := false, true
		for peer := range h.world {
			if peer == h.rank || h.rank > 0 && peer > 0 {
				continue
			}
			if h.hasLeft(peer) {
				continue
			}
			more, err := h.swap(peer)
			if err != nil {
				h.suspects(peer, err)
				h.fail(h.lost(peer, err))
				return
			}
			busy, left = busy || more, left && h.hasLeft(peer)
		}
		if left {
			return
		}
		if h.rank == 0 {
			h.observe()
			if !busy {
				h.pause()
			}
		}
	}
}

// pause waits until there is something to send, for a limited time.
func (h *Host) pause() {
	select {
	case <-h.wake:
	case <-time.After(roundPause):
	}
}

func (h *Host) hasLeft(peer int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.gone[peer]
}

// lost returns the error of a failed swap, which names the process that does not answer.
// Ranks other than 0 always see rank 0 as silent, even if rank 0 is itself waiting for another
// rank; only rank 0 knows which.
func (h *Host) lost(peer int, err error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	who := fmt.Sprintf("rank %d", peer)
	if h.where[peer] != "" {
		who += " (" + h.where[peer] + ")"
	}
	during := ""
	for _, p := range h.reports[peer].In { // on other ranks, index 0 holds their own report
		if h.rank == 0 && p.Phase != watch.Idle && p.Op != "" {
			during = " in " + p.Op
		}
	}
	kind := comm.ErrLost
	if h.rank > 0 {
		what := "it is lost, or has ended the job without the rank that it names"
		if errors.Is(err, comm.ErrTimeout) {
			kind, err = comm.ErrTimeout, fmt.Errorf("for %v", time.Since(h.heard[peer]).Round(time.Millisecond))
			what = "it gives no sign of life, or waits for a rank that gives none and that it names"
		}
		return fmt.Errorf("%w: %s, by which the ranks hear of each other, does not answer: %w: %s", kind, who, err, what)
	}
	if errors.Is(err, comm.ErrTimeout) {
		return fmt.Errorf("%w: %s gave no sign of life for %v%s", comm.ErrTimeout, who, time.Since(h.heard[peer]).Round(time.Millisecond), during)
	}
	return fmt.Errorf("%w: %s%s: %w", kind, who, during, err)
}

// swap exchanges blocks with a peer and tells whether either side has more to send.
func (h *Host) swap(peer int) (more bool, err error) {
	out := h.compose(peer)
	text, err := json.Marshal(out)
	if err != nil || int64(len(text)) > h.block-4 {
		return false, fmt.Errorf("a block of %d bytes, want at most %d: %w", len(text), h.block-4, err)
	}
	binary.LittleEndian.PutUint32(h.pinned, uint32(len(text)))
	copy(h.pinned[4:], text)
	if err := h.trade(peer); err != nil {
		return false, err
	}
	theirs := h.pinned[h.block:]
	n := int64(binary.LittleEndian.Uint32(theirs))
	var in letter
	if n > h.block-4 {
		return false, fmt.Errorf("a block of %d bytes", n)
	}
	if err := json.Unmarshal(theirs[4:4+n], &in); err != nil {
		return false, fmt.Errorf("a block: %w", err)
	}
	h.take(peer, &in, &out)
	return out.More || in.More, nil
}

// trade moves the two blocks of a swap over NCCL.
func (h *Host) trade(peer int) error {
	api, s := h.gpu, h.stream
	far := at(h.near, h.block)
	err := api.CopyToDevice(h.near, unsafe.Pointer(&h.pinned[0]), h.block, s)
	if err == nil {
		err = h.api.GroupStart()
	}
	if err == nil {
		err = errors.Join(h.api.Send(h.near, h.block, peer, h.control.handle, s), h.api.Recv(far, h.block, peer, h.control.handle, s), h.api.GroupEnd())
	}
	if err == nil {
		err = h.settle(&h.control, "a heartbeat")
	}
	if err == nil {
		err = api.CopyToHost(unsafe.Pointer(&h.pinned[h.block]), far, h.block, s)
	}
	if err == nil {
		err = api.Record(h.event, s)
	}
	for began, pause := time.Now(), firstPause; err == nil; pause = min(2*pause, longPause/4) {
		done, e := api.Done(h.event)
		if done || e != nil {
			return e
		}
		if _, err = h.api.State(h.control.handle); err == nil {
			err = h.waiting(peer, began)
		}
		time.Sleep(pause)
	}
	return err
}

// waiting is called while a peer does not answer. After some time it warns; after the
// timeout it returns an error.
func (h *Host) waiting(peer int, began time.Time) error {
	if h.given(began) {
		return comm.ErrTimeout
	}
	h.mu.Lock()
	say := ""
	if quiet := time.Since(h.heard[peer]); quiet > hostSilent && h.started && !h.named && h.err == nil {
		h.named = true
		end := "the job ends"
		if h.shrinks {
			end = "it is taken for lost"
		}
		what := "gives no sign of life"
		if h.rank > 0 {
			what = "does not answer: it gives no sign of life, or waits for a rank that gives none and that it names"
		}
		say = fmt.Sprintf("rank %d (%s) %s; %s in %v unless it comes back", peer, h.where[peer], what, end, (h.timeout - quiet).Round(100*time.Millisecond))
	}
	warn := h.warn
	h.mu.Unlock()
	if say != "" {
		warn(say)
	}
	return nil
}

// compose returns the letter that this rank sends to a peer next.
func (h *Host) compose(peer int) letter {
	h.mu.Lock()
	defer h.mu.Unlock()
	var l letter
	if h.err != nil {
		l.Kind, l.Err = world.Kind(h.err), h.err.Error()
		l.Err = l.Err[:min(len(l.Err), blockReserve/4)]
	}
	if h.rank > 0 {
		r := h.reports[0]
		r.In = slices.Clone(r.In)
		l.Report, l.Has = &r, h.whole
		if l.Seq = h.seq; h.seq > h.whole {
			l.Said = h.said[0]
		}
	} else if h.has[peer] < h.whole && h.come[peer] == h.whole {
		l.Seq, l.All = h.whole, h.all
	}
	host, _ := os.Hostname()
	l.Where = fmt.Sprintf("host %s, process %d", host, os.Getpid())
	room := (h.block - helloInBlock*int64(h.world)) * 5 / 8
	if s := h.streams[peer]; s != nil {
		n := min(int64(len(s.out)), room)
		l.Bytes, s.out = s.out[:n:n], s.out[n:]
		l.End = s.closed && len(s.out) == 0
		l.More = len(s.out) > 0
		s.room.Broadcast()
	}
	select {
	case <-h.leaving:
		s := h.streams[peer]
		l.Left = s == nil || len(s.out) == 0
	default:
	}
	return l
}

// take processes the letter that a peer sent (in) and the one that was sent to it (out).
func (h *Host) take(peer int, in, out *letter) {
	h.mu.Lock()
	s := h.streams[peer]
	if s == nil && (len(in.Bytes) > 0 || in.End) {
		s = h.newStream(peer)
	}
	h.heard[peer], h.where[peer] = time.Now(), in.Where
	h.named = false
	if in.Left && out.Left || h.shrinks && (in.loss() || out.loss()) {
		h.gone[peer] = true
	}
	if h.rank == 0 {
		if in.Report != nil && h.slots > 0 && len(in.Report.In) == h.slots {
			beat := h.reports[peer].Beat
			h.reports[peer] = *in.Report
			h.reports[peer].Beat = beat + 1
		}
		if in.Seq > h.whole {
			h.said[peer] = in.Said
		}
		h.come[peer], h.has[peer] = in.Seq, in.Has
		h.gathered()
	} else if in.Seq > h.whole {
		h.whole, h.all = in.Seq, in.All
		h.cond.Broadcast()
	}
	sound := h.err == nil
	h.mu.Unlock()
	if in.Err != "" && sound {
		h.fail(world.Told(in.Kind, in.Err))
	}
	if s != nil && len(in.Bytes) > 0 {
		s.come(in.Bytes)
		in.More = true // an answer may follow
	}
	if s != nil && in.End {
		s.end()
	}
}

// gathered completes a gather once all ranks have contributed; the caller holds mu.
func (h *Host) gathered() {
	h.come[0] = h.seq
	for _, n := range h.come {
		if n <= h.whole {
			return
		}
	}
	h.whole++
	h.all = append([][]byte(nil), h.said...)
	h.cond.Broadcast()
}

// observe passes the reports of all ranks to rank 0's watchdog.
func (h *Host) observe() {
	h.mu.Lock()
	if h.machine == nil || h.err != nil {
		h.mu.Unlock()
		return
	}
	if time.Since(h.looked) < lookEvery {
		h.mu.Unlock()
		return
	}
	h.looked = time.Now()
	h.reports[0].Beat++
	var end error
	for _, v := range h.machine.Observe(time.Since(h.began), h.reports) {
		if v.Kind == watch.End {
			end = v.Err
		}
	}
	h.mu.Unlock()
	if end != nil {
		h.fail(end)
	}
}
