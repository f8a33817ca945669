// Package nccltest has two doubles of NCCL, whose ranks each have a device of a
// drivertest.Driver. Fabric is between the ranks of one process: it copies on their streams,
// and holds what a rank asks for against what its peers do: sequence, sizes, roots and
// streams. Wire is between processes, for whole commands: it moves the bytes over sockets.
package nccltest
