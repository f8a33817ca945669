// Package nccltest is a double of NCCL between ranks of one process, each on a device of a
// drivertest.Driver. It copies on the ranks' streams, and holds what a rank asks for
// against what its peers do: sequence, sizes, roots and streams.
package nccltest
