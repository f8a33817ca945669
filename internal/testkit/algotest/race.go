//go:build race

package algotest

// Race reports whether the race detector is on in this process. It sees one process at a time and
// makes each about ten times slower. So tests of many processes run only one job of each kind under
// it.
const Race = true
