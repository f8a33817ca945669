package nearest

import (
	"regexp"
	"strings"
)

var (
	numbers = regexp.MustCompile(`\{[^}]*\}?`)
	layer   = regexp.MustCompile(`\.[0-9]+\.`)
)

// Patterns returns the n names nearest to a pattern that matches none of them, in the pattern's
// form. If the pattern has * (or a range such as {0-3}) for several layer numbers, the results have
// * there. If it ends in *, they are cut to a prefix.
func Patterns(pattern string, names []string, n int) []string {
	key := numbers.ReplaceAllString(pattern, "*")
	body, cut := strings.CutSuffix(key, "*")
	var entries [][]string
	seen := map[string]bool{}
	add := func(s string) {
		if !seen[s] {
			seen[s] = true
			entry := []string{s}
			if strings.HasSuffix(s, "."+key) || strings.HasSuffix(key, "."+s) {
				entry = append(entry, key) // a prefix is missing, or one too many
			}
			entries = append(entries, entry)
		}
	}
	for _, name := range names {
		if strings.Contains(body, "*") {
			name = layer.ReplaceAllString(name, ".*.")
		}
		if !cut || !strings.Contains(name, ".") {
			add(name)
			continue
		}
		for i := range len(name) {
			if name[i] == '.' {
				add(name[:i] + ".*")
			}
		}
	}
	return Names(key, entries, n)
}
