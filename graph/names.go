package graph

import (
	"fmt"
	"path"
	"strconv"
	"strings"
)

// MatchName says whether the name of a buffer or unit matches a pattern. Patterns are those
// of path.Match, with {A-B} added for a decimal number from A to B: "h.{0-11}.mlp.act".
func MatchName(pattern, name string) (bool, error) {
	i := strings.IndexByte(pattern, '{')
	if i < 0 {
		return path.Match(pattern, name)
	}
	lo, hi, end, err := numberRange(pattern, i)
	if err != nil {
		return false, err
	}
	for s := 0; s < len(name); s++ {
		if !digit(name[s]) {
			continue
		}
		e := s + 1
		for e < len(name) && digit(name[e]) {
			e++
		}
		n, err := strconv.ParseInt(name[s:e], 10, 64)
		if err == nil && n >= lo && n <= hi {
			before, err := path.Match(pattern[:i], name[:s])
			if err != nil {
				return false, err
			}
			if before {
				if ok, err := MatchName(pattern[end:], name[e:]); ok || err != nil {
					return ok, err
				}
			}
		}
		s = e
	}
	return false, nil
}

// Limits of a pattern. A longer one is a typing error: no name is that long, and no model
// has that many layers.
const (
	maxPattern = 256 // bytes
	maxNumber  = 999_999
)

// CheckPattern returns an error if MatchName cannot use the pattern.
func CheckPattern(pattern string) error {
	if pattern == "" {
		return fmt.Errorf("a pattern is empty")
	}
	if len(pattern) > maxPattern {
		return fmt.Errorf("%.80q: a pattern of %d characters; at most %d are possible", pattern, len(pattern), maxPattern)
	}
	rest := pattern
	for {
		i := strings.IndexByte(rest, '{')
		if i < 0 {
			break
		}
		_, _, end, err := numberRange(rest, i)
		if err != nil {
			return err
		}
		rest = rest[:i] + "0" + rest[end:]
	}
	if _, err := path.Match(rest, ""); err != nil {
		return fmt.Errorf("%.80q is not a pattern of names", pattern)
	}
	return nil
}

func digit(c byte) bool { return c >= '0' && c <= '9' }

// numberRange reads the {A-B} at pattern[i:]; end is the index after it.
func numberRange(pattern string, i int) (lo, hi int64, end int, err error) {
	bad := func() error { return fmt.Errorf("%.80q: write a range of numbers as {0-11}", pattern) }
	j := strings.IndexByte(pattern[i:], '}')
	if j < 0 {
		return 0, 0, 0, bad()
	}
	a, b, ok := strings.Cut(pattern[i+1:i+j], "-")
	if !ok {
		return 0, 0, 0, bad()
	}
	lo, err1 := strconv.ParseInt(a, 10, 64)
	hi, err2 := strconv.ParseInt(b, 10, 64)
	if err1 != nil || err2 != nil || lo < 0 || hi < lo {
		return 0, 0, 0, bad()
	}
	if hi > maxNumber {
		return 0, 0, 0, fmt.Errorf("%.80q: a range of numbers ends at %d at most", pattern, maxNumber)
	}
	return lo, hi, i + j + 1, nil
}
