package shm

import (
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/comm/watch"
	"github.com/spillway-ml/spillway/internal/crash"
)

// monitor updates the heartbeats of this process's ranks and watches all ranks.
func (w *World) monitor() {
	defer crash.Guard()
	defer close(w.stopped)
	m := watch.New(watch.Config{World: w.job.world, Groups: w.groups, Interval: beatEvery, Silent: silentAfter, Timeout: w.timeout,
		Where: w.job.Where})
	deaths := newDeaths(w)
	defer deaths.close()
	reports := make([]watch.Report, w.job.world)
	began := time.Now()
	for {
		for _, r := range w.local {
			w.job.rank(r).beat.Add(1)
		}
		if w.job.header().ended.Load() != 0 {
			_ = w.adopt()
		}
		w.read(reports, deaths)
		for _, v := range m.Observe(time.Since(began), reports) {
			switch {
			case v.Kind == watch.End:
				_ = w.fail(v.Err)
			case m.Speaker(reports) == w.local[0]:
				w.warn(v.Text)
			}
		}
		select {
		case <-w.stop:
			return
		default:
		}
		deaths.wait(w.stop, beatEvery)
	}
}

// read fills the reports of all ranks.
func (w *World) read(reports []watch.Report, d *deaths) {
	for r := range reports {
		a, rep := w.job.rank(r), &reports[r]
		rep.State, rep.Beat = watch.State(a.state.Load()), a.beat.Load()
		if rep.State == watch.Alive && d.dead[r] {
			rep.State = watch.Dead
		}
		if rep.In == nil {
			rep.In = make([]watch.Progress, len(w.members))
		}
		for slot := range rep.In {
			p := w.job.post(slot, r)
			call, phase := p.came.Load(), watch.Phase(p.phase.Load())
			rep.In[slot] = watch.Progress{Call: call, Phase: phase}
			if phase != watch.Idle {
				// The signature is left out, since it may already belong to the next call. The ranks
				// themselves compare signatures when they meet.
				rep.In[slot].Op = p.text.String()
			}
		}
		rep.Point = watch.Progress{Call: a.pointCall.Load(), Phase: watch.Phase(a.point.Load()), Op: a.pointText.String()}
		rep.Peer = int(a.pointPeer.Load()) % w.job.world
	}
}

// deaths detects the end of a process of the job at once, with pidfds.
type deaths struct {
	w    *World
	fds  []unix.PollFd // of processes, by ranks
	who  []int
	open map[int]bool
	dead []bool
}

func newDeaths(w *World) *deaths {
	return &deaths{w: w, open: map[int]bool{}, dead: make([]bool, w.job.world)}
}

// wait returns after most, or as soon as a process has ended.
func (d *deaths) wait(stop <-chan struct{}, most time.Duration) {
	for r := range d.w.job.world {
		a := d.w.job.rank(r)
		pid := int(a.pid.Load())
		if d.open[r] || pid == 0 || pid == os.Getpid() {
			continue
		}
		d.open[r] = true
		fd, err := unix.PidfdOpen(pid, 0)
		switch err {
		case nil:
			d.fds, d.who = append(d.fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}), append(d.who, r)
		case unix.ESRCH:
			d.dead[r] = true // without pidfd support in the kernel, only the heartbeat tells
		}
	}
	if len(d.fds) == 0 {
		select {
		case <-stop:
		case <-time.After(most):
		}
		return
	}
	n, err := unix.Poll(d.fds, int(most/time.Millisecond))
	if n <= 0 || err != nil {
		return
	}
	for i := 0; i < len(d.fds); {
		if d.fds[i].Revents == 0 {
			i++
			continue
		}
		d.dead[d.who[i]] = true
		_ = unix.Close(int(d.fds[i].Fd))
		last := len(d.fds) - 1
		d.fds[i], d.who[i] = d.fds[last], d.who[last]
		d.fds, d.who = d.fds[:last], d.who[:last]
	}
}

func (d *deaths) close() {
	for _, f := range d.fds {
		_ = unix.Close(int(f.Fd))
	}
}
