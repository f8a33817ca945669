package token

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// bpeTokenizer converts text to tokens in four stages: added tokens, normalization, splitting,
// merges.
type bpeTokenizer struct {
	name      string
	model     *bpe
	raw       *addedSet // found in the unchanged text; nil: none
	normalize []normalizer
	normed    *addedSet  // found in the normalized text; nil: none
	meta      *metaspace // nil: none; otherwise split is metaspace's
	split     []splitter
	before    []int32 // tokens at the start of a prompt
	eot       int32
	specials  Specials
	cuttable  bool // the rule of Cut applies

	scratch sync.Pool
}

func (t *bpeTokenizer) Name() string   { return t.name }
func (t *bpeTokenizer) VocabSize() int { return len(t.model.tokens) }
func (t *bpeTokenizer) EOT() int32     { return t.eot }

// cacheEntries is the number of pieces that an encoder caches at most, and cacheBytes their maximum
// length. Text repeats its words, and a lookup is faster than merging.
const (
	cacheEntries = 1 << 15
	cacheBytes   = 32
)

func (t *bpeTokenizer) Encode(text string) []int32 { return t.encode(text, false) }

// EncodeMore encodes text that follows a cut, without the prefix that a tokenizer adds before a
// text.
func (t *bpeTokenizer) EncodeMore(text string) []int32 { return t.encode(text, true) }

func (t *bpeTokenizer) encode(text string, more bool) []int32 {
	out, _ := t.encodeAll(text, more, nil)
	return out
}

// Marking returns tok's Encode that also gives, for each of the ascending byte offsets in marks, the
// index of the token that holds that byte.
func Marking(tok Tokenizer) (func(text string, marks []int) (tokens []int32, at []int), error) {
	t, ok := tok.(*bpeTokenizer)
	if !ok {
		return nil, fmt.Errorf("tokenizer %s cannot be used for conversations, only those that Spillway reads", tok.Name())
	}
	if len(t.split) > 1 && slices.ContainsFunc(t.split, func(s splitter) bool { return s.prefixSpace }) {
		return nil, fmt.Errorf("tokenizer %s puts spaces inside a text (add_prefix_space behind another pre_tokenizer), so answers cannot be found among its tokens", tok.Name())
	}
	return func(text string, marks []int) ([]int32, []int) { return t.encodeAll(text, false, marks) }, nil
}

func (t *bpeTokenizer) encodeAll(text string, more bool, marks []int) (out []int32, at []int) {
	if !utf8.ValidString(text) {
		text = string([]rune(text)) // each invalid byte becomes U+FFFD
	}
	s, _ := t.scratch.Get().(*scratch)
	if s == nil {
		s = &scratch{cache: map[string][]int32{}}
	}
	defer t.scratch.Put(s)
	out = make([]int32, 0, len(text)/3+1)
	first := true // this is the first section of the text
	token := func(id int32) { out, first = append(out, id), false }
	// inside are the marks in the current section, as byte offsets in its text.
	merge := func(text string, inside []int) {
		plain, n := text, len(out)
		if t.meta != nil {
			text = t.meta.apply(text, first && !more, more && first)
		}
		out, first = t.appendText(out, text, 0, s), false
		if len(inside) > 0 {
			at = t.holding(at, out, n, plain, inside)
		}
	}
	section := func(text string, inside []int) {
		normal := t.normalized(text, more && first)
		for i, m := range inside {
			inside[i] = 0
			if m > 0 {
				inside[i] = min(len(t.normalized(text[:m], more && first)), len(normal)-1)
			}
		}
		if t.normed == nil {
			merge(normal, inside)
			return
		}
		t.normed.sections(normal, func(begin, end int) { merge(normal[begin:end], within(&inside, begin, end)) }, func(id int32, begin, end int) {
			for range within(&inside, begin, end) {
				at = append(at, len(out))
			}
			token(id)
		})
	}
	marks = slices.Clone(marks)
	if t.raw == nil {
		if len(text) > 0 {
			section(text, marks)
		}
		return out, at
	}
	t.raw.sections(text, func(begin, end int) { section(text[begin:end], within(&marks, begin, end)) }, func(id int32, begin, end int) {
		for range within(&marks, begin, end) {
			at = append(at, len(out))
		}
		token(id)
	})
	return out, at
}

// within removes the marks before end from the list and returns them relative to begin.
func within(marks *[]int, begin, end int) []int {
	n := 0
	for n < len(*marks) && (*marks)[n] < end {
		(*marks)[n] -= begin
		n++
	}
	taken := (*marks)[:n]
	*marks = (*marks)[n:]
	return taken
}

// holding appends to at the index of the token of out[n:] that holds each byte offset in marks.
// plain is the section's text; its tokens may start with an added space.
func (t *bpeTokenizer) holding(at []int, out []int32, n int, plain string, marks []int) []int {
	// A space of SentencePiece has 3 bytes in the text, 1 in a token.
	length := func(s string) int { return len(s) - 2*strings.Count(s, spaceMark) }
	if t.meta == nil {
		length = func(s string) int { return len(s) }
	}
	total := 0
	for _, id := range out[n:] {
		total += len(t.model.tokens[id])
	}
	put := total - length(plain) // bytes that were added before the text
	i, end := n, 0
	for _, m := range marks {
		place := length(plain[:m]) + put
		for i < len(out) {
			if next := end + len(t.model.tokens[out[i]]); next <= place {
				i, end = i+1, next
				continue
			}
			break
		}
		at = append(at, min(i, len(out)-1))
	}
	return at
}

// appendText runs the splitters from the given stage on, then the merges.
func (t *bpeTokenizer) appendText(dst []int32, text string, stage int, s *scratch) []int32 {
	if stage == len(t.split) {
		if len(text) > cacheBytes {
			return t.model.encodePiece(dst, text, s)
		}
		if known, ok := s.cache[text]; ok {
			return append(dst, known...)
		}
		n := len(dst)
		dst = t.model.encodePiece(dst, text, s)
		if len(s.cache) >= cacheEntries {
			clear(s.cache)
		}
		s.cache[strings.Clone(text)] = slices.Clone(dst[n:])
		return dst
	}
	sp := &t.split[stage]
	if sp.prefixSpace && !strings.HasPrefix(text, " ") {
		text = " " + text
	}
	if sp.all != nil {
		sp.all(text, func(piece string) { dst = t.appendText(dst, piece, stage+1, s) })
		return dst
	}
	for len(text) > 0 {
		n := len(text)
		if sp.first != nil {
			n = sp.first(text)
		}
		dst = t.appendText(dst, text[:n], stage+1, s)
		text = text[n:]
	}
	return dst
}

func (t *bpeTokenizer) Decode(tokens []int32) string {
	var out strings.Builder
	for _, id := range tokens {
		if id < 0 || int(id) >= len(t.model.tokens) {
			out.WriteString("\uFFFD")
		} else {
			out.WriteString(t.model.tokens[id])
		}
	}
	return out.String()
}

// Cut cuts between a letter or digit and an ASCII space, tab or line end. There every pattern that
// this package knows ends a piece, whatever follows, and none looks behind, so both sides are split
// as in the complete text. Merges of characters end there before a space if no token contains both
// side by side.
func (t *bpeTokenizer) Cut(text []byte, from int) int {
	if !t.cuttable {
		return 0
	}
	for i := len(text) - 1; i > 0 && i >= from; i-- {
		switch text[i] {
		case ' ', '\t', '\n', '\r':
			r, _ := utf8.DecodeLastRune(text[:i])
			if unicode.In(r, unicode.L, unicode.N) && (t.meta == nil || text[i] == ' ' && t.meta.apart(r)) {
				return i
			}
		}
	}
	return 0
}

// Within cuts before a letter that starts a line, where patterns end a piece too. Without such
// a letter it cuts between any two characters.
func (t *bpeTokenizer) Within(text []byte) int {
	if !t.cuttable {
		return 0
	}
	last := 0
	for i := len(text) - 1; i > 0; i-- {
		if !utf8.RuneStart(text[i]) {
			continue
		}
		last = cmp.Or(last, i)
		if t.meta != nil {
			break
		}
		before, _ := utf8.DecodeLastRune(text[:i-1])
		if r, _ := utf8.DecodeRune(text[i:]); text[i-1] == '\n' && unicode.IsLetter(r) && !unicode.IsSpace(before) {
			return i
		}
	}
	return last
}

// isBytes says that the tokens are exactly the 256 bytes.
func (t *bpeTokenizer) isBytes() bool {
	m := t.model
	if len(m.tokens) != 256 || len(m.merges) > 0 || t.raw != nil || t.normed != nil || len(t.normalize) > 0 || t.meta != nil || t.before != nil {
		return false
	}
	for b, id := range m.byteToken {
		if int(id) != b {
			return false
		}
	}
	return true
}

// normalized runs the normalizers over non-empty text. continues says that text follows a cut, so
// nothing is added before it.
func (t *bpeTokenizer) normalized(text string, continues bool) string {
	for _, n := range t.normalize {
		switch {
		case n.nfc:
			text = norm.NFC.String(text)
		case n.prepend != "":
			if !continues {
				text = n.prepend + text
			}
		default:
			text = strings.ReplaceAll(text, n.from, n.to)
		}
	}
	return text
}

// Prompt returns the tokens of a text that a model is to continue: the start token that
// tokenizer.json adds before a single text, then those of Encode. Training data have no start
// token: EOT separates documents.
func Prompt(tok Tokenizer, text string) []int32 {
	tokens := tok.Encode(text)
	if t, ok := tok.(*bpeTokenizer); ok && len(t.before) > 0 {
		tokens = append(append(make([]int32, 0, len(t.before)+len(tokens)), t.before...), tokens...)
	}
	return tokens
}
