package cli

import (
	"os"
	"os/signal"
	"sync/atomic"
	"time"
)

// Burst is the time after a first signal in which further signals count as the same request:
// timeout(1) signals its child and then its group, a closing terminal hangs up twice, and a person
// presses a key again.
const Burst = 2 * time.Second

// Catch relays signals to c, except those that were ignored when the process started.
func Catch(c chan<- os.Signal, list ...os.Signal) {
	for _, s := range list {
		if !signal.Ignored(s) {
			signal.Notify(c, s)
		}
	}
}

// interrupt is the function that OnInterrupt set.
var interrupt atomic.Pointer[func() bool]

// OnInterrupt calls f at the next SIGINT, unless remove is called before. If f returns true, the
// command continues as if there were no signal.
func OnInterrupt(f func() bool) (remove func()) {
	interrupt.Store(&f)
	return func() { interrupt.CompareAndSwap(&f, nil) }
}

// TakesInterrupt calls the function that OnInterrupt set and returns its result, or false if none
// is set.
func TakesInterrupt() bool {
	f := interrupt.Swap(nil)
	return f != nil && (*f)()
}

// Interrupts receives a value when another process of the job was interrupted.
var Interrupts = make(chan struct{}, 1)

// Interrupt ends the command as a first signal to this process does. A later signal to this process
// still counts as the first one: it may be the same request, from a launcher that signals all
// ranks.
func Interrupt() {
	select {
	case Interrupts <- struct{}{}:
	default:
	}
}

// Promptly is the time that an interrupted command has to end.
const Promptly = 300 * time.Millisecond

// Sheltered counts the calls of Shelter that a signal must not cut off.
var Sheltered atomic.Int32

// Shelter keeps the process alive after a signal until leave is called. Its caller has a state to
// save and watches the context.
func Shelter() (leave func()) {
	Sheltered.Add(1)
	return func() { Sheltered.Add(-1) }
}

// Again sends a signal to this process again, with its default effect.
func Again(s os.Signal) {
	signal.Reset(s)
	if p, err := os.FindProcess(os.Getpid()); err == nil && p.Signal(s) == nil {
		time.Sleep(time.Second) // until the signal ends the process
	}
}
