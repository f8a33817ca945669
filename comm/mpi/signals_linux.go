package mpi

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// signals holds the signal actions from before an MPI library was opened, so that keep can
// restore them where the library installed its own handlers.
//
// SIGABRT gets its default action. A library that aborts has printed the reason, as UCX does
// if a peer died while its memory was read; Go's dump of all goroutines would add nothing.
//
// SIGHUP: UCX, which MPICH uses, takes it for debugging. It gets its previous action back.
//
// SIGUSR1: MPICH's launcher with -disable-auto-cleanup sends it to the other ranks when a
// rank has died. MPICH's handler calls the previous handler, Go's, which has two requirements:
//
//   - Handlers must run on the signal stack (SA_ONSTACK). MPICH's handler does not ask for it
//     and would run on a goroutine's stack: Go then ends the process with a dump of all
//     goroutines, or the stack is too small.
//   - The program must be notified of the signal (signal.Notify). If it is not and a thread of
//     the library receives the signal, Go applies the default action and ends the process.
type signals map[syscall.Signal]sigaction

// signalsBefore is called before a library is opened.
func signalsBefore() (signals, error) {
	signal.Notify(make(chan os.Signal, 1), syscall.SIGUSR1)
	s := signals{}
	for _, sig := range []syscall.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM} {
		var a sigaction
		if err := actionOf(sig, nil, &a); err != nil {
			return nil, err
		}
		s[sig] = a
	}
	return s, nil
}

// keep restores the program's signal actions and makes every other handler run on the
// signal stack, as Go does for libc's handlers.
func (s signals) keep() error {
	for sig, a := range s {
		if err := actionOf(sig, &a, nil); err != nil {
			return err
		}
	}
	if err := actionOf(syscall.SIGABRT, &sigaction{}, nil); err != nil { // default: end the process
		return err
	}
	list, err := offStack()
	if err != nil {
		return err
	}
	for _, sig := range list {
		var a sigaction
		if err := actionOf(sig, nil, &a); err != nil {
			return err
		}
		a.flags |= onStack
		if err := actionOf(sig, &a, nil); err != nil {
			return err
		}
	}
	return nil
}

// offStack lists the signals whose handlers lack SA_ONSTACK.
func offStack() (list []syscall.Signal, err error) {
	for sig := syscall.Signal(1); sig <= lastSignal; sig++ {
		var a sigaction
		if err := actionOf(sig, nil, &a); err != nil {
			return nil, err
		}
		if a.handler > ignored && a.flags&onStack == 0 {
			list = append(list, sig)
		}
	}
	return list, nil
}

// sigaction is the kernel's struct; the fields after flags are passed through unchanged.
type sigaction struct {
	handler, flags uintptr
	rest           [2]uint64
}

const (
	ignored    = 1 // SIG_IGN, as a handler; SIG_DFL is 0
	onStack    = 0x08000000
	lastSignal = 64
	maskBytes  = 8
)

// actionOf sets a signal's action, or reads it.
func actionOf(sig syscall.Signal, set, get *sigaction) error {
	_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(set)), uintptr(unsafe.Pointer(get)), maskBytes, 0, 0)
	if errno != 0 {
		return fmt.Errorf("mpi: the action of signal %d: %w", int(sig), errno)
	}
	return nil
}
