package cli

import (
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/spillway-ml/spillway/internal/crash"
)

// TellWithin is the time between two lines of progress if there is no terminal.
const TellWithin = 1500 * time.Millisecond

// beatEvery is the period of Beat. Together with TellWithin it is less than two seconds.
const beatEvery = 250 * time.Millisecond

// Beat calls tell periodically from another goroutine until stop is called. stop waits until that
// goroutine has ended.
func Beat(tell func()) (stop func()) {
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer crash.Guard()
		defer close(ended)
		tick := time.NewTicker(beatEvery)
		defer tick.Stop()
		for {
			select {
			case <-end:
				return
			case <-tick.C:
				tell()
			}
		}
	}()
	return sync.OnceFunc(func() {
		close(end)
		<-ended
	})
}

// Due reports whether the next line of progress is due. told is the time of the last line, since
// the start of the work. A line is due after TellWithin, and after a tenth of the time since the
// start, so that a step of hours does not fill the log.
func Due(told, since time.Time) bool {
	return time.Since(told) >= max(TellWithin, time.Since(since)/10)
}

// Took formats the time since the start of some work, for the end of a line.
func Took(since time.Time) string { return fmt.Sprintf("… %.1f s", time.Since(since).Seconds()) }

// Pace predicts the remaining time of some work from the parts that are done.
type Pace struct {
	Began time.Time // when the first part was done
	first int
}

// Left formats the remaining time once done of the parts are done. It returns "" after the first
// part, which touches new memory and so takes longer than the others.
func (p *Pace) Left(done, of int) string {
	if p.first == 0 {
		p.first, p.Began = done, time.Now()
	}
	n := done - p.first
	if n <= 0 {
		return ""
	}
	return fmt.Sprintf("%s left", time.Duration(float64(time.Since(p.Began))/float64(n)*float64(of-done)).Round(time.Second))
}

// Progress shows the current computation: in a live line on a terminal, otherwise in a line every
// TellWithin, so that a command is never silent for two seconds. Nothing else may write to its
// writer between Says and End. Says, Later and End of a nil Progress do nothing.
type Progress struct {
	w     io.Writer
	live  *LiveLine // nil: not a terminal
	began time.Time
	stop  func() // nil: not running

	mu   sync.Mutex
	what string
	told time.Time // when the last line was due
}

// NewProgress returns a Progress that shows nothing yet.
func NewProgress(w io.Writer) *Progress { return &Progress{w: w, live: NewLiveLine(w)} }

// Says sets the description of the current computation and shows it.
func (p *Progress) Says(what string) { p.says(what, true) }

// Later sets the description of a computation that is usually short: a terminal too shows it only
// when the next line is due.
func (p *Progress) Later(what string) { p.says(what, false) }

func (p *Progress) says(what string, now bool) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.what = what
	switch {
	case p.live != nil && now:
		p.live.Show([]string{what}, true)
	case p.live != nil:
		p.live.clear()
	}
	if p.stop == nil {
		p.began, p.told = time.Now(), time.Now()
		p.stop = Beat(p.tell)
	}
}

func (p *Progress) tell() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if time.Since(p.told) < TellWithin {
		return
	}
	p.told = time.Now()
	took := fmt.Sprintf("%.1f s", time.Since(p.began).Seconds())
	if p.live != nil {
		p.live.Show([]string{p.what, took}, true)
		return
	}
	fmt.Fprintln(p.w, p.what, took)
}

// Note writes a permanent line.
func (p *Progress) Note(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	Above(p.live, p.w, text)
}

// End stops the progress; it may be called more than once.
func (p *Progress) End() {
	if p == nil || p.stop == nil {
		return
	}
	p.stop()
	p.stop = nil
	if p.live != nil {
		p.live.clear()
	}
}
