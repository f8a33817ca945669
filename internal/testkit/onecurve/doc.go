// Package onecurve holds a reproducible run over the processes of a host, in shared
// memory and over MPI, against the same run on one rank: its tests start the command.
package onecurve
