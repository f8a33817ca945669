// Package nearest finds the known names that a mistyped one may have meant.
package nearest

import (
	"cmp"
	"slices"
)

// Names returns the n entries with the fewest edits between key and one of their spellings,
// nearest first. A shared prefix breaks ties, then the order of the entries. An entry's first
// spelling is its name.
func Names(key string, entries [][]string, n int) []string {
	if len(key) > 64 {
		key = key[:64] // the time is quadratic in the length, and typing errors are in short names
	}
	type candidate struct {
		name             string
		distance, prefix int
	}
	var all []candidate
	for _, spellings := range entries {
		best := candidate{spellings[0], 1 << 30, 0}
		for _, s := range spellings {
			d, pre := editDistance(key, s), 0
			for pre < min(len(key), len(s)) && key[pre] == s[pre] {
				pre++
			}
			if d < best.distance || d == best.distance && pre > best.prefix {
				best.distance, best.prefix = d, pre
			}
		}
		all = append(all, best)
	}
	slices.SortStableFunc(all, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.distance, b.distance), cmp.Compare(b.prefix, a.prefix))
	})
	var names []string
	for _, c := range all[:min(n, len(all))] {
		names = append(names, c.name)
	}
	return names
}

// Distance returns the number of single-byte edits between a and b.
func Distance(a, b string) int {
	const most = 64 // the time is quadratic in the length, and typing errors are in short names
	return editDistance(a[:min(len(a), most)], b[:min(len(b), most)])
}

// editDistance returns the Levenshtein distance over bytes.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			edit := diagonal
			if a[i] != b[j] {
				edit++
			}
			diagonal = row[j+1]
			row[j+1] = min(edit, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
