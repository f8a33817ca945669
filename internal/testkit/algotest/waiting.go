package algotest

import "time"

// waits is how often Waiting looks.
const waits = 3

// Waiting is the share of a core that a process takes while wait does: the least of some
// rounds, since what else the process does, and what a busy machine adds, is not in each.
// Every rank calls it alike.
func Waiting(cpu func() time.Duration, wait func() error) (share float64, err error) {
	share = 1
	for range waits {
		began, before := time.Now(), cpu()
		if err = wait(); err != nil {
			return share, err
		}
		share = min(share, float64(cpu()-before)/float64(time.Since(began)))
	}
	return share, nil
}
