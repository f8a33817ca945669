package token

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/dlclark/regexp2"
)

// The split patterns of common byte-level BPE tokenizers, as their tokenizer.json spells them.
// The scanners below implement them by hand, ten times as fast as the regular expression; tests
// compare the two.
const (
	patternGPT2   = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
	patternLlama3 = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	patternQwen2  = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	patternGPT4o  = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
)

// patterns holds the splitter of each pattern.
var patterns = map[string]func() splitter{
	patternGPT2:   func() splitter { return splitter{first: splitGPT2} },
	patternLlama3: func() splitter { return splitter{first: func(text string) int { return splitLlama(text, 3) }} },
	patternQwen2:  func() splitter { return splitter{first: func(text string) int { return splitLlama(text, 1) }} },
	patternGPT4o:  func() splitter { return splitter{all: regexpSplit(patternGPT4o)} },
}

// class is a class of characters that the patterns distinguish.
type class uint8

const (
	other class = iota // [^\s\p{L}\p{N}]
	letter
	number
	space
)

var asciiClass = func() (t [utf8.RuneSelf]class) {
	for r := range t {
		t[r] = slowClass(rune(r))
	}
	return t
}()

func slowClass(r rune) class {
	switch {
	case unicode.Is(unicode.L, r):
		return letter
	case unicode.Is(unicode.N, r):
		return number
	case unicode.Is(unicode.White_Space, r):
		return space
	}
	return other
}

// classAt returns the class and length of the character at text[i]. The end of the text is a space
// of length 0.
func classAt(text string, i int) (class, int) {
	if i >= len(text) {
		return space, 0
	}
	if b := text[i]; b < utf8.RuneSelf {
		return asciiClass[b], 1
	}
	r, n := utf8.DecodeRuneInString(text[i:])
	return slowClass(r), n
}

// run returns the end of the characters of class c from i on, at most limit of them.
func run(text string, i int, c class, limit int) int {
	for ; limit > 0; limit-- {
		k, n := classAt(text, i)
		if k != c || n == 0 {
			break
		}
		i += n
	}
	return i
}

const unlimited = 1<<31 - 1

// spaces implements \s+(?!\S)|\s+ for a text that starts with a run of spaces ending at end. At the
// end of the text it returns the complete run. Otherwise it returns the run without its last space,
// which belongs to the next piece; a single space is returned.
func spaces(text string, end int) int {
	if end == len(text) {
		return end
	}
	_, last := utf8.DecodeLastRuneInString(text[:end])
	if end > last {
		return end - last
	}
	return end
}

// contraction returns the length of 's, 't, 're, 've, 'm, 'll or 'd at the start, or 0.
func contraction(text string, anyCase bool) int {
	if len(text) < 2 || text[0] != '\'' {
		return 0
	}
	a, b := text[1], byte(0)
	if len(text) > 2 {
		b = text[2]
	}
	if anyCase {
		// U+017F folds to s.
		if strings.HasPrefix(text[1:], "ſ") {
			return 3
		}
		a, b = lower(a), lower(b)
	}
	switch {
	case a == 's', a == 't', a == 'm', a == 'd':
		return 2
	case a == 'r' && b == 'e', a == 'v' && b == 'e', a == 'l' && b == 'l':
		return 3
	}
	return 0
}

func lower(b byte) byte {
	if 'A' <= b && b <= 'Z' {
		return b + 'a' - 'A'
	}
	return b
}

// splitGPT2 implements patternGPT2.
func splitGPT2(text string) int {
	if n := contraction(text, false); n > 0 {
		return n
	}
	i := 0
	c, n := classAt(text, 0)
	if text[0] == ' ' {
		if next, m := classAt(text, 1); next != space {
			i, c, n = 1, next, m
		}
	}
	if c != space {
		return run(text, i+n, c, unlimited)
	}
	return spaces(text, run(text, n, space, unlimited))
}

// splitLlama implements patternLlama3, or with digits 1 patternQwen2.
func splitLlama(text string, digits int) int {
	if n := contraction(text, true); n > 0 {
		return n
	}
	c, n := classAt(text, 0)
	if c == letter {
		return run(text, n, letter, unlimited)
	}
	if next, m := classAt(text, n); next == letter && c != number && text[0] != '\r' && text[0] != '\n' {
		return run(text, n+m, letter, unlimited)
	}
	if c == number {
		return run(text, n, number, digits-1)
	}
	i := 0
	if text[0] == ' ' {
		if next, m := classAt(text, 1); next == other {
			i, c, n = 1, other, m
		}
	}
	if c == other {
		i = run(text, i+n, other, unlimited)
		for i < len(text) && (text[i] == '\r' || text[i] == '\n') {
			i++
		}
		return i
	}
	end := run(text, n, space, unlimited)
	if i := strings.LastIndexAny(text[:end], "\r\n"); i >= 0 {
		return i + 1
	}
	return spaces(text, end)
}

// splitDigits is the Digits pre-tokenizer: it separates numeric characters from others. With each
// set, every digit is a separate piece.
func splitDigits(each bool) func(string) int {
	return func(text string) int {
		c, n := classAt(text, 0)
		if c == number {
			if each {
				return n
			}
			return run(text, n, number, unlimited)
		}
		for i := n; i < len(text); i += n {
			if c, n = classAt(text, i); c == number {
				return i
			}
		}
		return len(text)
	}
}

// compile compiles a pattern. regexp2 does not fold U+017F to s, as the
// reference's engine does in (?i:'s).
func compile(pattern string) *regexp2.Regexp {
	return regexp2.MustCompile(strings.ReplaceAll(pattern, "(?i:'s", "(?i:'[sſ]"), regexp2.None)
}

// regexpSplit returns a splitter for a pattern that covers every text completely.
func regexpSplit(pattern string) func(text string, yield func(string)) {
	re := compile(pattern)
	return func(text string, yield func(string)) {
		// Pieces are located by their lengths, since regexp2 matches in a copy of the text as
		// runes.
		m, err := re.FindStringMatch(text)
		for err == nil && m != nil && len(text) > 0 {
			n := len(m.String())
			yield(text[:n])
			text = text[n:]
			m, err = re.FindNextMatch(m)
		}
		if len(text) > 0 {
			yield(text)
		}
	}
}
