package graph

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// maxFoldGroup is the largest number of lines in a group that folds.
const maxFoldGroup = 1024

// foldIndent is written before a folded line and is not part of it.
const foldIndent = "  "

// numberedLine is a line split at its numbers: text has one more element than nums. Lines
// that differ only in their numbers have the same shape.
type numberedLine struct {
	text  []string
	nums  []int64
	shape int
}

// numbers splits line around its decimal numbers. A number that would not print the same (leading
// zeros, more than 18 digits) stays text.
func numbers(line string) (text []string, nums []int64) {
	start := 0
	for i := 0; i < len(line); {
		if line[i] < '0' || line[i] > '9' {
			i++
			continue
		}
		j := i
		for j < len(line) && line[j] >= '0' && line[j] <= '9' {
			j++
		}
		if j-i <= 18 && (line[i] != '0' || j == i+1) {
			n, _ := strconv.ParseInt(line[i:j], 10, 64)
			text, nums = append(text, line[start:i]), append(nums, n)
			start = j
		}
		i = j
	}
	return append(text, line[start:]), nums
}

// foldLines writes lines to b. Groups of lines that repeat with counting numbers are written
// once.
func foldLines(b *strings.Builder, lines []string) {
	shapes := map[string]int{}
	all := make([]numberedLine, len(lines))
	for i, l := range lines {
		text, nums := numbers(l)
		key := strings.Join(text, "\x00")
		id, ok := shapes[key]
		if !ok {
			id = len(shapes)
			shapes[key] = id
		}
		all[i] = numberedLine{text, nums, id}
	}
	for i := 0; i < len(lines); {
		group, times := bestFold(all, i)
		if times == 0 {
			b.WriteString(lines[i])
			b.WriteByte('\n')
			i++
			continue
		}
		fmt.Fprintf(b, "×%d {\n", times)
		for j := i; j < i+group; j++ {
			l, next := &all[j], &all[j+group]
			b.WriteString(foldIndent)
			for k, n := range l.nums {
				b.WriteString(l.text[k])
				if step := next.nums[k] - n; step == 0 {
					b.WriteString(strconv.FormatInt(n, 10))
				} else {
					fmt.Fprintf(b, "<%d%+d>", n, step)
				}
			}
			b.WriteString(l.text[len(l.nums)])
			b.WriteByte('\n')
		}
		b.WriteString("}\n")
		i += group * times
	}
}

// bestFold returns the group of lines starting at i whose repetition saves the most lines, and
// how often it repeats; 0 times if nothing repeats at least three times.
func bestFold(all []numberedLine, i int) (group, times int) {
	saved := 0
	for g := 1; g <= maxFoldGroup && i+3*g <= len(all); g++ {
		t := 1
		for t < math.MaxInt32 && i+(t+1)*g <= len(all) && follows(all, i, g, t) {
			t++
		}
		if s := g * (t - 1); t >= 3 && s > saved {
			group, times, saved = g, t, s
		}
	}
	return group, times
}

// follows says whether group t continues the counting of groups 0 … t−1, which start at line i.
func follows(all []numberedLine, i, g, t int) bool {
	for j := i; j < i+g; j++ {
		first, last, l := &all[j], &all[j+(t-1)*g], &all[j+t*g]
		if l.shape != first.shape {
			return false
		}
		for k, n := range l.nums {
			if n-last.nums[k] != all[j+g].nums[k]-first.nums[k] {
				return false
			}
		}
	}
	return true
}
