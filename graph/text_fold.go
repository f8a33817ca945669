package graph

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Limits of folding: the longest group of lines, and the largest text after unfolding.
const (
	maxFoldGroup  = 1024
	maxTextLines  = 1 << 18
	maxTextBytes  = 1 << 28
	maxLineGrowth = 20 // bytes of a counter's value
)

// foldIndent is written before a folded line and is not part of it.
const foldIndent = "  "

// numberedLine is a line split at its numbers: text has one more element than nums. Lines
// that differ only in their numbers have the same shape.
type numberedLine struct {
	text  []string
	nums  []int64
	shape int
}

// numbers splits line around its decimal numbers. A number that would not print the same
// (leading zeros, more than 18 digits) stays text.
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

// unfold calls visit for every line of text with its line number, where text's first line has
// number first. Folded lines are expanded. It stops at the first error.
func unfold(text string, first int, visit func(number int, line string) error) error {
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	total, bytes := 0, 0
	emit := func(number int, line string) error {
		total, bytes = total+1, bytes+len(line)
		if total > maxTextLines || bytes > maxTextBytes {
			return fmt.Errorf("line %d: the text unfolds to more than %d lines or %d bytes", number, maxTextLines, maxTextBytes)
		}
		return visit(number, line)
	}
	for i := 0; i < len(lines); i++ {
		count, ok := strings.CutPrefix(lines[i], "×")
		if !ok {
			if err := emit(i+first, lines[i]); err != nil {
				return err
			}
			continue
		}
		n, err := strconv.Atoi(strings.TrimSuffix(count, " {"))
		if err != nil || !strings.HasSuffix(count, " {") || n < 1 {
			return fmt.Errorf("line %d: %q, want ×N { with N at least 1", i+first, lines[i])
		}
		end := i + 1
		for end < len(lines) && lines[end] != "}" {
			end++
		}
		if end == len(lines) {
			return fmt.Errorf("line %d: no } closes this group", i+first)
		}
		if group := end - i - 1; group > 0 && n > (maxTextLines-total)/group {
			return fmt.Errorf("line %d: the text unfolds to more than %d lines", i+first, maxTextLines)
		}
		for t := range n {
			for j := i + 1; j < end; j++ {
				line, err := writeCounters(strings.TrimPrefix(lines[j], foldIndent), int64(t))
				if err != nil {
					return fmt.Errorf("line %d: %w", j+first, err)
				}
				if err := emit(j+first, line); err != nil {
					return err
				}
			}
			if end == i+1 {
				break
			}
		}
		i = end
	}
	return nil
}

// writeCounters returns a folded line with its counters replaced by their values in
// repetition t.
func writeCounters(line string, t int64) (string, error) {
	if !strings.Contains(line, "<") {
		return line, nil
	}
	var b strings.Builder
	b.Grow(len(line) + maxLineGrowth)
	for {
		text, rest, ok := strings.Cut(line, "<")
		b.WriteString(text)
		if !ok {
			return b.String(), nil
		}
		counter, after, ok := strings.Cut(rest, ">")
		sign := strings.LastIndexAny(counter, "+-")
		if !ok || sign < 1 {
			return "", fmt.Errorf("%q is not a counter, want <first+step> or <first-step>", "<"+counter)
		}
		first, err1 := strconv.ParseInt(counter[:sign], 10, 64)
		step, err2 := strconv.ParseInt(counter[sign:], 10, 64)
		if err1 != nil || err2 != nil || first < 0 || first > 1e18 || step < -1e18 || step > 1e18 {
			return "", fmt.Errorf("<%s> is not a counter of numbers up to 10^18", counter)
		}
		if step != 0 && t > (math.MaxInt64-first)/max(step, -step) || first+step*t < 0 {
			return "", fmt.Errorf("<%s>: in repetition %d the counter is below 0 or above 2^63 − 1", counter, t)
		}
		b.WriteString(strconv.FormatInt(first+step*t, 10))
		line = after
	}
}
