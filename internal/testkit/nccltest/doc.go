// Package nccltest has two doubles of NCCL, whose ranks each have a device of a drivertest.Driver.
// Fabric connects the ranks of one process: it copies on their streams, and checks a rank's calls
// against those of its peers by order, size, root and stream. Wire connects processes, for tests of
// complete commands, and sends the bytes over sockets.
package nccltest
