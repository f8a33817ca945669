// Package onecurve tests that a reproducible run over processes of a host, in shared memory and
// over MPI, equals the same run on one rank. Its tests start the command.
package onecurve
