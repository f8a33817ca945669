//go:build !linux

package mpi

import (
	"errors"
	"io"
	"runtime"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/graph"
)

// Family is an ABI of MPI libraries.
type Family int

// Families.
const (
	OpenMPI Family = iota
	ABI
	MPICH
)

// LibraryVar is the environment variable that names the library's file.
const LibraryVar = "SPILLWAY_MPI"

// WorldError says that MPI's rank or size differs from the launcher's environment.
type WorldError struct{}

func (*WorldError) Error() string { return "mpi: another world" }

var errSystem = errors.New("mpi: libraries are opened on Linux only; this is " + runtime.GOOS)

// Options of a World.
type Options struct {
	Timeout  time.Duration
	Warn     func(string)
	Messages bool
}

// Process cannot be started on this system.
type Process struct{}

// World cannot be joined on this system.
type World struct{}

// Start returns an error.
func Start([]Family, int, int, time.Duration) (*Process, error) { return nil, errSystem }

// About returns "".
func (*Process) About() string { return "" }

// Failed returns false.
func (*Process) Failed() bool { return false }

// Close does nothing.
func (*Process) Close() error { return nil }

// Stream returns an error.
func (*Process) Stream(int) (io.ReadWriteCloser, error) { return nil, errSystem }

// Join returns an error.
func (*Process) Join([]graph.Axis, int, Options) (*World, error) { return nil, errSystem }

// Groups returns an error.
func (*World) Groups(int) (map[int]comm.Group, error) { return nil, errSystem }

// OnError does nothing.
func (*World) OnError(func(error)) {}

// Flight returns "".
func (*World) Flight(int) string { return "" }

// Close does nothing.
func (*World) Close() error { return nil }

// Peer stands for MPI's own collectives, which are not available on this system.
type Peer struct{}

// Peer returns an error.
func (*Process) Peer() (*Peer, error) { return nil, errSystem }

// Run returns an error.
func (*Peer) Run(comm.Op, []byte, []byte, int) (time.Duration, error) { return 0, errSystem }
