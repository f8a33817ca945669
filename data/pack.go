package data

import "slices"

// pack assigns documents of 1 to seq tokens to rows of seq tokens, by best-fit decreasing as
// TRL's packing_strategy "bfd". Documents are taken longest first, equal ones in order. Each
// goes to the fullest row with room for it; of equally full rows, to the one that reached that
// level first. It returns the documents by row, and the index in that list of each row's first
// one.
func pack(lengths []int, seq int) (docs []int32, rows []int32) {
	order := make([]int32, len(lengths))
	for i := range order {
		order[i] = int32(i)
	}
	slices.SortStableFunc(order, func(a, b int32) int { return lengths[b] - lengths[a] })
	var in [][]int32            // documents of each row
	waiting := map[int][]int{}  // rows by remaining room
	rooms := newLeastAbove(seq) // the keys of waiting
	for _, doc := range order {
		n := lengths[doc]
		room := rooms.find(n)
		var row int
		if room == 0 {
			row, room = len(in), seq
			in = append(in, nil)
		} else {
			row = waiting[room][0]
			if waiting[room] = waiting[room][1:]; len(waiting[room]) == 0 {
				rooms.set(room, false)
			}
		}
		in[row] = append(in[row], doc)
		if room -= n; room > 0 {
			waiting[room] = append(waiting[room], row)
			rooms.set(room, true)
		}
	}
	for _, row := range in {
		rows = append(rows, int32(len(docs)))
		docs = append(docs, row...)
	}
	return docs, append(rows, int32(len(docs)))
}

// leastAbove is a set of numbers from 1 on that finds the smallest member ≥ n. It is a tree of
// maxima whose i-th leaf represents the number i+1.
type leastAbove []int

func newLeastAbove(most int) leastAbove {
	leaves := 1
	for leaves < most {
		leaves *= 2
	}
	return make(leastAbove, 2*leaves)
}

func (s leastAbove) set(n int, in bool) {
	i := len(s)/2 + n - 1
	if s[i] = 0; in {
		s[i] = n
	}
	for i /= 2; i > 0; i /= 2 {
		s[i] = max(s[2*i], s[2*i+1])
	}
}

// find returns the least member of at least n; 0 if there is none.
func (s leastAbove) find(n int) int {
	if s[1] < n {
		return 0
	}
	i := 1
	for i < len(s)/2 {
		if i *= 2; s[i] < n {
			i++
		}
	}
	return s[i]
}
