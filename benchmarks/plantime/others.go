package main

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const tick = 0.01 // s: USER_HZ is 100 on every Linux architecture that Go runs on

// look is the processor time in s that the machine has used so far for programs
// at normal priority and up, and lost to other machines of its host, without what
// this process used. Programs that give way to everybody (nice) do not count.
type look struct {
	at     time.Time
	others float64
}

// lookAround reads /proc/stat; off Linux it sees nobody.
func lookAround() look {
	l := look{at: time.Now()}
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return l
	}
	f := strings.Fields(string(text)) // cpu user nice system idle iowait irq softirq steal
	if len(f) < 9 {
		return l
	}
	user, _ := strconv.ParseFloat(f[1], 64)
	steal, _ := strconv.ParseFloat(f[8], 64)
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return l
	}
	own := float64(u.Utime.Sec) + float64(u.Utime.Usec)/1e6
	l.others = (user+steal)*tick - own
	return l
}

// since is the share of the processors that went elsewhere since before. The
// system counts in ticks: over some tenths of a second it is good to a few
// hundredths.
func (l look) since(before look) float64 {
	return (l.others - before.others) / l.at.Sub(before.at).Seconds() / float64(runtime.NumCPU())
}
