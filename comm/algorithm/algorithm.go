// Package algorithm has the names of the algorithms of collectives. Package comm/algo has
// the algorithms.
package algorithm

import (
	"fmt"
	"strings"
)

// Name of an algorithm.
type Name string

// Algorithms. W ranks, n bytes of the whole buffer; what a rank receives in an
// all-reduce, and in how many rounds.
const (
	// Auto chooses among those of one bracketing, by size and number of ranks.
	Auto Name = "auto"
	// Direct: each rank reads its share from all others and adds it, then all shares:
	// 2n(W−1)/W in 2 rounds of W−1 messages. It is the transports' own.
	Direct Name = "direct"
	// Tree: a binary tree over the ranks, up and down: n·log2 W on the way up at rank 0,
	// n at the others on the way down, 2⌈log2 W⌉ rounds of one message. Least for few
	// bytes and many ranks.
	Tree Name = "tree"
	// Halving is recursive halving and doubling (Rabenseifner 2004): 2n(W−1)/W in
	// 2·log2 W rounds of one message where W is a power of two. Otherwise the blocks of
	// W's binary digits halve by themselves, are added from the last to the first, and
	// ranks beyond the first block fetch the whole result.
	Halving Name = "halving-doubling"
	// Hierarchical halves within each host, then across hosts, where each of a host's
	// ranks has its own part: between hosts go 2n/L·(H−1)/H for a rank, of L ranks on
	// each of H hosts.
	Hierarchical Name = "hierarchical"
	// Ring (Patarasu and Yuan 2009): 2n(W−1)/W in 2(W−1) rounds of one message. The sum
	// of each part begins at another rank: its bits are its own.
	Ring Name = "ring"
	// Server is a synchronous sharded parameter server (Li and others 2014): S = ⌈W/2⌉
	// ranks, spread over all, hold a share each; the others push theirs, and pull the
	// result: n(W−1)/S and then n(S−1)/S at a server, n at the others, in 2 rounds.
	Server Name = "server"
)

// Names are all algorithms, Auto first.
var Names = []Name{Auto, Direct, Tree, Halving, Hierarchical, Ring, Server}

// Parse returns the algorithm of a name, in any case.
func Parse(s string) (Name, error) {
	var list []string
	for _, n := range Names {
		if strings.EqualFold(s, string(n)) {
			return n, nil
		}
		list = append(list, string(n))
	}
	return "", fmt.Errorf("%.80q: want %s", s, strings.Join(list, ", "))
}
