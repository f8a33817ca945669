package cli

import (
	"os"
	"os/signal"
	"sync/atomic"
	"time"
)

// Burst is the time after a first signal in which others mean the same: timeout(1)
// signals its child and then its group, a terminal that closes hangs up twice, and a
// person presses a key again.
const Burst = 2 * time.Second

// Catch has signals sent to c, but for those that were ignored when the process
// started.
func Catch(c chan<- os.Signal, list ...os.Signal) {
	for _, s := range list {
		if !signal.Ignored(s) {
			signal.Notify(c, s)
		}
	}
}

// interrupt is told of a SIGINT first: see OnInterrupt.
var interrupt atomic.Pointer[func() bool]

// OnInterrupt has f told of the next SIGINT, until remove is called. Where f returns true the
// command goes on as if there had been none.
func OnInterrupt(f func() bool) (remove func()) {
	interrupt.Store(&f)
	return func() { interrupt.CompareAndSwap(&f, nil) }
}

// TakesInterrupt tells the command of a SIGINT, and whether it takes it.
func TakesInterrupt() bool {
	f := interrupt.Swap(nil)
	return f != nil && (*f)()
}

// Interrupts has a value when another process of the job was interrupted.
var Interrupts = make(chan struct{}, 1)

// Interrupt has the command end as at a first signal to this process. Signals to this process itself
// are not counted with it: a later one may be the same request, from a launcher that signals all ranks.
func Interrupt() {
	select {
	case Interrupts <- struct{}{}:
	default:
	}
}

// Promptly is how long a command has to end by itself when it is interrupted.
const Promptly = 300 * time.Millisecond

// Sheltered counts what a signal must not cut off.
var Sheltered atomic.Int32

// Shelter keeps the process alive, after a signal, until what it returns is called:
// somebody has a state to save, and looks at the context.
func Shelter() (leave func()) {
	Sheltered.Add(1)
	return func() { Sheltered.Add(-1) }
}

// Again gives a signal its usual effect.
func Again(s os.Signal) {
	signal.Reset(s)
	if p, err := os.FindProcess(os.Getpid()); err == nil && p.Signal(s) == nil {
		time.Sleep(time.Second) // it ends us
	}
}
