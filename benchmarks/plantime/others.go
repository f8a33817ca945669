package main

import (
	"runtime"
	"time"
)

// look is the processor time in s that the machine has used so far for programs
// at normal priority and up, and lost to other machines of its host, without what
// this process used. Programs that give way to everybody (nice) do not count.
type look struct {
	at     time.Time
	others float64
}

// since is the share of the processors that went elsewhere since before. The
// system counts in ticks: over some tenths of a second it is good to a few
// hundredths.
func (l look) since(before look) float64 {
	return (l.others - before.others) / l.at.Sub(before.at).Seconds() / float64(runtime.NumCPU())
}
