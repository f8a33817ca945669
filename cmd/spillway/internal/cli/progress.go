package cli

import (
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/spillway-ml/spillway/internal/crash"
)

// TellWithin is the time between two lines where there is no terminal.
const TellWithin = 1500 * time.Millisecond

// beatEvery is how often Beat calls. With TellWithin it is less than two seconds.
const beatEvery = 250 * time.Millisecond

// Beat calls tell from a goroutine of its own until stop is called, which waits for it.
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

// Due reports whether a line is due about what has gone on since a time, where the last one was told at told: after
// TellWithin, and after a tenth of the time that it has taken, so that a log does not grow with hours of one step.
func Due(told, since time.Time) bool {
	return time.Since(told) >= max(TellWithin, time.Since(since)/10)
}

// Took is the end of a line about something that has gone on for a while.
func Took(since time.Time) string { return fmt.Sprintf("… %.1f s", time.Since(since).Seconds()) }

// Pace predicts from the parts of some work how long the rest takes.
type Pace struct {
	Began time.Time // when the first of them was done
	first int
}

// Left is the text for it, once done of the parts are done: "" after the first one, which has
// memory to touch and says little of the others.
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

// Progress says what a command computes: on a terminal in a live line, elsewhere in a line
// every TellWithin, so that a command is never silent for two seconds. Nobody else may write
// to its writer between Says and End. A nil Progress says nothing.
type Progress struct {
	w     io.Writer
	live  *LiveLine // nil: not a terminal
	began time.Time
	stop  func() // nil: nothing is said

	mu   sync.Mutex
	what string
	told time.Time // when the last line was due
}

// NewProgress returns a Progress that says nothing yet.
func NewProgress(w io.Writer) *Progress { return &Progress{w: w, live: NewLiveLine(w)} }

// Says replaces what is said to be computed.
func (p *Progress) Says(what string) { p.says(what, true) }

// Later is Says for what is mostly short: a terminal too shows it only at the next line's time.
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

// Note writes a line that stays.
func (p *Progress) Note(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	Above(p.live, p.w, text)
}

// End says nothing more; it may be called more than once.
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
