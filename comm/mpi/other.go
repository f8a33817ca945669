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

// Family is an interface of MPI libraries.
type Family int

// Families.
const (
	OpenMPI Family = iota
	ABI
	MPICH
)

// LibraryVar is the environment variable that names the library's file.
const LibraryVar = "SPILLWAY_MPI"

// WorldError is the refusal of a library whose world is not the environment's.
type WorldError struct{}

func (*WorldError) Error() string { return "mpi: another world" }

var errSystem = errors.New("mpi: libraries are opened on Linux only; this is " + runtime.GOOS)

// Options of a World.
type Options struct {
	Timeout  time.Duration
	Warn     func(string)
	Messages bool
}

// Process can't be started on this system.
type Process struct{}

// World can't be joined on this system.
type World struct{}

// Start refuses.
func Start([]Family, int, int, time.Duration) (*Process, error) { return nil, errSystem }

// About says nothing.
func (*Process) About() string { return "" }

// Close does nothing.
func (*Process) Close() error { return nil }

// Stream refuses.
func (*Process) Stream(int) (io.ReadWriteCloser, error) { return nil, errSystem }

// Join refuses.
func (*Process) Join([]graph.Axis, int, Options) (*World, error) { return nil, errSystem }

// Groups refuses.
func (*World) Groups(int) (map[int]comm.Group, error) { return nil, errSystem }

// OnError does nothing.
func (*World) OnError(func(error)) {}

// Flight says nothing.
func (*World) Flight(int) string { return "" }

// Close does nothing.
func (*World) Close() error { return nil }

// OutsideBytes is 0: there is no MPI.
func OutsideBytes(int, int) int64 { return 0 }

// Peer is the library's own collectives.
type Peer struct{}

// Peer fails.
func (*Process) Peer() (*Peer, error) { return nil, errSystem }

// Run fails.
func (*Peer) Run(comm.Op, []byte, []byte, int) (time.Duration, error) { return 0, errSystem }
