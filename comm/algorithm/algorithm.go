// Package algorithm has the names of the algorithms of collectives. Package comm/algo has
// the algorithms.
package algorithm

import (
	"fmt"
	"strings"
)

// Name of an algorithm.
type Name string

// Algorithms. Each comment gives the bytes that a rank receives in an all-reduce and the
// number of rounds, for W ranks and a buffer of n bytes.
const (
	// Auto chooses by size and number of ranks, among the algorithms that add in the same
	// order (all but Ring).
	Auto Name = "auto"
	// Direct: each rank reads its share from all other ranks and adds it, then reads all
	// summed shares: 2n(W−1)/W in 2 rounds of W−1 messages. Transports implement it.
	Direct Name = "direct"
	// Tree: a binary tree over the ranks, up and down: n·log2 W on the way up at rank 0,
	// n at the others on the way down, 2⌈log2 W⌉ rounds of one message. Fastest for few
	// bytes and many ranks.
	Tree Name = "tree"
	// Halving is recursive halving and doubling (Rabenseifner 2004): 2n(W−1)/W in
	// 2·log2 W rounds of one message if W is a power of two. Otherwise the ranks form one
	// block for each binary digit 1 of W. Each block halves separately, the blocks' sums are
	// added from the last to the first, and ranks outside the first block fetch the result.
	Halving Name = "halving-doubling"
	// Hierarchical halves within each host, then across hosts, each rank of a host for its
	// own part. With L ranks on each of H hosts, a rank receives 2n/L·(H−1)/H from other
	// hosts.
	Hierarchical Name = "hierarchical"
	// Ring (Patarasu and Yuan 2009): 2n(W−1)/W in 2(W−1) rounds of one message. The sum of
	// each part starts at a different rank, so its bits differ from the other algorithms'.
	Ring Name = "ring"
	// Server is a synchronous sharded parameter server (Li and others 2014): S = ⌈W/2⌉
	// ranks, every second one, are servers and hold a share each. All ranks push their inputs
	// to the servers and pull the result: n(W−1)/S and then n(S−1)/S at a server, n at the
	// other ranks, in 2 rounds.
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
