package algo

import (
	"sync"
	"time"

	"github.com/spillway-ml/spillway/comm"
)

// Link is the cost of a message between two ranks: Latency + bytes × PerByte.
type Link struct {
	Latency time.Duration
	PerByte time.Duration // time for 1 MiB rather than one byte, so that it is a whole number
}

// Cluster is a link with tens of microseconds of latency and about 1 GB/s, such as MPI
// over Ethernet with progress by polling. Auto uses it for transports that send messages.
var Cluster = Link{Latency: 30 * time.Microsecond, PerByte: time.Millisecond}

// Seconds estimates the time of an algorithm in seconds. A round takes as long as its
// slowest rank, which receives one message from each rank that it reads from.
func (l Link) Seconds(a Name, op comm.Op, ranks, perHost int, bytes int64) (float64, error) {
	perByte := l.PerByte.Seconds() / (1 << 20)
	if a == Direct {
		w := float64(ranks)
		one := float64((w-1)*l.Latency.Seconds()) + float64(float64(bytes)*(w-1)/w*perByte)
		if op == comm.AllReduce {
			one *= 2
		}
		return one, nil
	}
	n := bytes / int64(ranks) * int64(ranks)
	rounds, err := Rounds(a, op, ranks, perHost, n)
	if err != nil {
		return 0, err
	}
	sum := 0.0
	for _, round := range rounds {
		longest := 0.0
		for r, moves := range round {
			from, got := map[int]bool{}, int64(0)
			for _, m := range moves {
				for _, f := range m.From {
					if f != r {
						from[f] = true
						got += m.Len
					}
				}
			}
			longest = max(longest, float64(float64(len(from))*l.Latency.Seconds())+float64(float64(got)*perByte))
		}
		sum += longest
	}
	return sum, nil
}

type asked struct {
	l              Link
	op             comm.Op
	ranks, perHost int
	log            int
}

var best sync.Map // caches the results of Best: key asked, value Name

// Best returns the algorithm of OneBracketing with the lowest estimated time. bytes is
// rounded to a power of two. All ranks get the same result.
func (l Link) Best(op comm.Op, ranks, perHost int, bytes int64) Name {
	key := asked{l, op, ranks, perHost, 0}
	for bytes>>key.log > 1 {
		key.log++
	}
	if a, ok := best.Load(key); ok {
		return a.(Name)
	}
	found, least := Direct, -1.0
	for _, a := range OneBracketing {
		if a == Hierarchical && perHost < 2 {
			continue
		}
		if s, err := l.Seconds(a, op, ranks, perHost, 1<<key.log); err == nil && (least < 0 || s < least) {
			found, least = a, s
		}
	}
	best.Store(key, found)
	return found
}
