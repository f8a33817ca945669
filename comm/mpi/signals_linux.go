package mpi

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// signals keeps what a program wants of signals where a library takes them for itself.
//
// A library that aborts has said why: UCX does where a peer has died while its memory was read.
// The stacks of all goroutines, which Go would write at a SIGABRT, say nothing of that.
//
// UCX, below MPICH, takes SIGHUP for its own debugging: what ends a program is given back.
//
// A launcher that goes on where a rank has died tells the others by SIGUSR1 (MPICH's, with
// -disable-auto-cleanup). MPICH has a handler for it, which calls the one before it, Go's.
// Go wants two things of that.
//
//   - A handler runs on the signal stack (SA_ONSTACK). MPICH's does not ask for it, and what
//     comes while a goroutine runs lands on the goroutine's stack: Go ends the process with
//     a dump of all goroutines, or the stack is too small.
//   - Somebody is notified of it. Where a thread of the library takes a signal that nobody
//     is, Go has it do what it does by default: it ends the process.
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

// keep gives back what is the program's, and has every other handler run on the signal
// stack, as Go itself has those of libc do.
func (s signals) keep() error {
	for sig, a := range s {
		if err := actionOf(sig, &a, nil); err != nil {
			return err
		}
	}
	if err := actionOf(syscall.SIGABRT, &sigaction{}, nil); err != nil { // by default it ends the process
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

// offStack lists the signals whose handlers do not run on the signal stack.
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

// sigaction is the kernel's: what follows the flags is passed through.
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
