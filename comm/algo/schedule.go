// Package algo describes algorithms of collectives as data. An operation is a list of
// rounds. In a round each rank replaces ranges of its vector by sums, or copies, of the same
// ranges of other ranks' vectors as they were before the round. Transports execute the rounds
// (comm.Caller.Round); this package moves no bytes.
//
// All algorithms but Ring add in the order of comm.Adder, so that they give the same bits.
package algo

import (
	"fmt"
	"math/bits"
	"slices"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/algorithm"
)

// Name of an algorithm.
type Name = algorithm.Name

// The algorithms; package algorithm describes them.
const (
	Auto         = algorithm.Auto
	Direct       = algorithm.Direct
	Tree         = algorithm.Tree
	Halving      = algorithm.Halving
	Hierarchical = algorithm.Hierarchical
	Ring         = algorithm.Ring
	Server       = algorithm.Server
)

// Rounds returns the rounds of a collective on a vector of n elements. For AllGather and
// ReduceScatter n is a multiple of ranks, and the i-th part belongs to rank i. perHost, used
// by Hierarchical, is the number of consecutive ranks on a host: a power of two that divides
// ranks, or 1.
//
// After AllReduce every rank has the whole sum, after AllGather all parts. After
// ReduceScatter every rank has its part of the sum; the rest of its vector is undefined.
func Rounds(a Name, op comm.Op, ranks, perHost int, n int64) ([]comm.Round, error) {
	s := &schedule{ranks: ranks, n: n}
	if ranks == 1 {
		return nil, nil
	}
	if perHost < 1 || ranks%perHost != 0 || perHost&(perHost-1) != 0 {
		return nil, fmt.Errorf("%d of %d ranks on a host: want a power of two that divides them", perHost, ranks)
	}
	switch op {
	case comm.AllReduce, comm.ReduceScatter:
		if !s.reduce(a, perHost) {
			return nil, fmt.Errorf("%s has no rounds", a)
		}
	case comm.AllGather:
		for r := range ranks {
			s.have = append(s.have, []span{s.part(r)})
		}
	default:
		return nil, fmt.Errorf("%s has no rounds", op)
	}
	if op == comm.ReduceScatter {
		s.scatter()
		return s.rounds, nil
	}
	if !s.spread(a, perHost) {
		return nil, fmt.Errorf("%s has no rounds", a)
	}
	return s.rounds, nil
}

// span is the elements [lo, hi) of the vector.
type span struct{ lo, hi int64 }

func (s span) and(o span) span { return span{max(s.lo, o.lo), min(s.hi, o.hi)} }
func (s span) empty() bool     { return s.lo >= s.hi }

// schedule is a list of rounds under construction.
type schedule struct {
	ranks  int
	n      int64
	rounds []comm.Round
	have   [][]span // by rank: the ranges of the result that it holds
}

func (s *schedule) part(i int) span {
	w := int64(s.ranks)
	return span{s.n * int64(i) / w, s.n * int64(i+1) / w}
}

// at returns round i and creates it if necessary.
func (s *schedule) at(i int) comm.Round {
	for len(s.rounds) <= i {
		s.rounds = append(s.rounds, make(comm.Round, s.ranks))
	}
	return s.rounds[i]
}

// add makes a rank replace range r by the sum of the same range of the ranks in from, in
// that order.
func (s *schedule) add(round, rank int, r span, from ...int) {
	if !r.empty() {
		t := s.at(round)
		t[rank] = append(t[rank], comm.Move{At: r.lo, Len: r.hi - r.lo, From: from})
	}
}

// fetch makes a rank copy the ranges of what that it lacks from another rank that has them.
func (s *schedule) fetch(round, rank, from int, what []span) {
	for _, r := range what {
		for _, m := range lacks(s.have[rank], r) {
			s.add(round, rank, m, from)
		}
	}
}

// lacks returns the parts of r that are not in have.
func lacks(have []span, r span) []span {
	rest := []span{r}
	for _, h := range have {
		var next []span
		for _, x := range rest {
			if h.and(x).empty() {
				next = append(next, x)
				continue
			}
			for _, y := range []span{{x.lo, h.lo}, {h.hi, x.hi}} {
				if !y.empty() {
					next = append(next, y)
				}
			}
		}
		rest = next
	}
	return rest
}

// reduce adds the rounds that compute the sum. Afterwards have says which rank holds which
// part of it.
func (s *schedule) reduce(a Name, perHost int) bool {
	s.have = make([][]span, s.ranks)
	all := span{0, s.n}
	switch a {
	case Tree:
		s.up(0, s.ranks, func(round, to, from int) { s.add(round, to, all, to, from) })
		s.have[0] = []span{all}
	case Halving:
		s.hold(s.halve(0, ascending(s.ranks), all))
	case Hierarchical:
		hosts := s.ranks / perHost
		regions := map[int]span{}
		for h := range hosts {
			for r, region := range s.halveBlock(0, ascending(s.ranks)[h*perHost:(h+1)*perHost], all) {
				regions[r] = region
			}
		}
		next := len(s.rounds)
		for l := range perHost {
			across := make([]int, hosts)
			for h := range across {
				across[h] = h*perHost + l
			}
			s.hold(s.halve(next, across, regions[l]))
		}
	case Ring:
		for k := range s.ranks - 1 {
			for r := range s.ranks {
				prev := (r + s.ranks - 1) % s.ranks
				s.add(k, r, s.part((r+s.ranks-k-1)%s.ranks), prev, r)
			}
		}
		for r := range s.ranks {
			s.have[r] = []span{s.part((r + 1) % s.ranks)}
		}
	case Server:
		for i, rank := range s.servers() {
			s.add(0, rank, s.share(i), ascending(s.ranks)...)
			s.have[rank] = []span{s.share(i)}
		}
	default:
		return false
	}
	return true
}

func (s *schedule) hold(regions map[int]span) {
	for r, region := range regions {
		if !region.empty() {
			s.have[r] = append(s.have[r], region)
		}
	}
}

func ascending(n int) []int {
	list := make([]int, n)
	for i := range list {
		list[i] = i
	}
	return list
}

// powerIn returns the largest power of two that is at most n, for n of at least 1.
func powerIn(n int) int { return 1 << (bits.Len(uint(n)) - 1) }

// up visits the tree of comm.Adder over ranks [lo, lo+n) bottom up. At each node, rank to
// adds the sum of the subtree whose first rank is from, in the given round. up returns the
// number of the next round.
func (s *schedule) up(lo, n int, visit func(round, to, from int)) int {
	if n == 1 {
		return 0
	}
	p := powerIn(n - 1)
	round := max(s.up(lo, p, visit), s.up(lo+p, n-p, visit))
	visit(round, lo, lo+p)
	return round + 1
}

// halve sums the range all over ranks by recursive halving. ranks are ordered so that
// their sums nest as in the tree of comm.Adder. It returns the part of the sum that each rank
// of the first block holds.
func (s *schedule) halve(round int, ranks []int, all span) map[int]span {
	var blocks []map[int]span
	next := round
	for rest := ranks; len(rest) > 0; {
		p := powerIn(len(rest))
		blocks = append(blocks, s.halveBlock(round, rest[:p], all))
		next = max(next, round+bits.Len(uint(p))-1)
		rest = rest[p:]
	}
	// The tree's sum of the blocks is first + (second + (third …)), so start with the last.
	for b := len(blocks) - 2; b >= 0; b-- {
		for r, region := range blocks[b] {
			for from, other := range blocks[b+1] {
				s.add(next, r, region.and(other), r, from)
			}
		}
		next++
	}
	return blocks[0]
}

// halveBlock is halve for a power of two of ranks. Neighbours exchange first, because the
// tree adds them first.
func (s *schedule) halveBlock(round int, ranks []int, all span) map[int]span {
	region := make([]span, len(ranks))
	for i := range region {
		region[i] = all
	}
	for d := 1; d < len(ranks); d *= 2 {
		for i, r := range ranks {
			mid := region[i].lo + (region[i].hi-region[i].lo)/2
			if i&d == 0 {
				region[i].hi = mid
			} else {
				region[i].lo = mid
			}
			s.add(round, r, region[i], ranks[i&^d], ranks[i|d])
		}
		round++
	}
	of := map[int]span{}
	for i, r := range ranks {
		of[r] = region[i]
	}
	return of
}

// servers returns the parameter servers, which hold the shares: every second rank.
func (s *schedule) servers() (list []int) {
	for r := 0; r < s.ranks; r += 2 {
		list = append(list, r)
	}
	return list
}

func (s *schedule) share(i int) span {
	k := int64(len(s.servers()))
	return span{s.n * int64(i) / k, s.n * int64(i+1) / k}
}

// scatter adds the rounds in which every rank copies its part from the ranks that hold it.
func (s *schedule) scatter() {
	round := len(s.rounds)
	for r := range s.ranks {
		for from, what := range s.have {
			for _, h := range what {
				if x := h.and(s.part(r)); !x.empty() && from != r {
					s.add(round, r, x, from)
				}
			}
		}
	}
}

// spread adds the rounds after which every rank has the whole result.
func (s *schedule) spread(a Name, perHost int) bool {
	switch a {
	case Tree:
		s.spreadTree()
	case Halving:
		s.double(ascending(s.ranks))
	case Hierarchical:
		s.spreadHosts(perHost)
	case Ring:
		s.spreadRing()
	case Server:
		s.spreadServers()
	default:
		return false
	}
	return true
}

// spreadTree collects the ranks' parts of the result at rank 0 and sends all of it down the
// tree.
func (s *schedule) spreadTree() {
	first := len(s.rounds)
	type edge struct{ round, to, from int }
	var edges []edge
	depth := s.up(0, s.ranks, func(round, to, from int) { edges = append(edges, edge{round, to, from}) })
	for round := range depth {
		for _, e := range edges {
			if e.round == round && len(s.have[e.from]) > 0 {
				s.fetch(first+round, e.to, e.from, s.have[e.from])
			}
		}
		for _, e := range edges {
			if e.round == round {
				s.have[e.to] = join(s.have[e.to], s.have[e.from])
			}
		}
	}
	first = len(s.rounds)
	for _, e := range edges {
		s.fetch(first+depth-1-e.round, e.from, e.to, []span{{0, s.n}})
	}
}

// join merges two lists of ranges in order and unites adjacent ranges.
func join(a, b []span) (list []span) {
	all := slices.Concat(a, b)
	slices.SortFunc(all, func(x, y span) int { return int(min(max(x.lo-y.lo, -1), 1)) })
	for _, x := range all {
		if n := len(list); n > 0 && x.lo <= list[n-1].hi {
			list[n-1].hi = max(list[n-1].hi, x.hi)
			continue
		}
		list = append(list, x)
	}
	return list
}

// double gives each rank of a group all parts of the result that any of them has, in several
// groups of equal size in the same rounds. The largest power of two of a group's ranks exchange by
// recursive doubling. Before that they fetch the parts of the remaining ranks, which fetch
// everything at the end.
func (s *schedule) double(groups ...[]int) {
	size := len(groups[0])
	p := powerIn(size)
	step := func(pairs func(ranks []int) [][2]int) { // to, from
		round := len(s.rounds)
		after := slices.Clone(s.have)
		for _, ranks := range groups {
			for _, e := range pairs(ranks) {
				s.fetch(round, e[0], e[1], s.have[e[1]])
				after[e[0]] = join(after[e[0]], s.have[e[1]])
			}
		}
		s.have = after
	}
	step(func(ranks []int) (list [][2]int) {
		for i := p; i < size; i++ {
			list = append(list, [2]int{ranks[i-p], ranks[i]})
		}
		return list
	})
	for d := p / 2; d > 0; d /= 2 {
		step(func(ranks []int) (list [][2]int) {
			for i := range p {
				list = append(list, [2]int{ranks[i], ranks[i^d]})
			}
			return list
		})
	}
	step(func(ranks []int) (list [][2]int) {
		for i := p; i < size; i++ {
			list = append(list, [2]int{ranks[i], ranks[i-p]})
		}
		return list
	})
}

// spreadHosts spreads the result by recursive doubling across hosts, then within each host.
func (s *schedule) spreadHosts(perHost int) {
	hosts := s.ranks / perHost
	across, within := make([][]int, perHost), make([][]int, hosts)
	for r := range s.ranks {
		across[r%perHost] = append(across[r%perHost], r)
		within[r/perHost] = append(within[r/perHost], r)
	}
	s.double(across...)
	s.double(within...)
}

// spreadRing spreads the result around the ring: in each round a rank passes on the part
// that it received last.
func (s *schedule) spreadRing() {
	moving := slices.Clone(s.have)
	for range s.ranks - 1 {
		round := len(s.rounds)
		next := make([][]span, s.ranks)
		for r := range s.ranks {
			prev := (r + s.ranks - 1) % s.ranks
			next[r] = moving[prev]
			s.fetch(round, r, prev, moving[prev])
		}
		for r := range s.ranks {
			s.have[r] = join(s.have[r], next[r])
		}
		moving = next
	}
}

// spreadServers sends the servers the missing parts of their shares; then every rank
// fetches the whole result from the servers.
func (s *schedule) spreadServers() {
	round, servers := len(s.rounds), s.servers()
	shares := make([][]span, s.ranks)
	for i, rank := range servers {
		for from, what := range s.have {
			for _, h := range what {
				if x := h.and(s.share(i)); from != rank {
					s.fetch(round, rank, from, []span{x})
				}
			}
		}
		shares[rank] = []span{s.share(i)}
	}
	for r := range s.have {
		s.have[r] = join(s.have[r], shares[r])
	}
	round = len(s.rounds)
	for r := range s.ranks {
		for _, rank := range servers {
			if r != rank {
				s.fetch(round, r, rank, shares[rank])
			}
		}
	}
}
