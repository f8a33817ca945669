package algotest

import "time"

// waits is the number of rounds that Waiting measures.
const waits = 3

// Waiting returns the share of a core that the process uses during wait. It is the lowest of
// several rounds, because other work of the process and a busy machine do not disturb every round.
// All ranks must call it.
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
