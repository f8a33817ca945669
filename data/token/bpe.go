package token

import (
	"container/heap"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// bpe merges the bytes of a piece of text into tokens (Sennrich et al. 2016), starting from bytes
// as in GPT-2, or from characters as in SentencePiece. It repeats until no neighbouring pair has a
// merge: of all pairs that have one it merges the pair of the lowest rank, of equal ones the
// leftmost.
type bpe struct {
	byteToken [256]int32 // -1: a byte that UTF-8 does not have
	// chars, if not nil, maps characters to the tokens that merging starts from. A character
	// that it lacks starts as its bytes' tokens (byte_fallback).
	chars  map[rune]int32
	merges map[uint64]merge
	// whole, if not nil, maps pieces to tokens. Such a piece becomes that token without any
	// merges: ignore_merges.
	whole  map[string]int32
	tokens []string // text of each token
}

type merge struct{ rank, token int32 }

func pairKey(left, right int32) uint64 { return uint64(uint32(left))<<32 | uint64(uint32(right)) }

// bpeFromRanks recovers the merges from a vocabulary in training order whose first 256 tokens are
// the bytes. A token's merge joins the two parts that are left of its text after all earlier
// merges.
func bpeFromRanks(tokens []string) (*bpe, error) {
	m := &bpe{merges: make(map[uint64]merge, len(tokens)), tokens: slices.Clone(tokens)}
	for i := range m.byteToken {
		m.byteToken[i] = -1
	}
	var s scratch
	for i, text := range tokens {
		if len(text) == 1 {
			m.byteToken[text[0]] = int32(i)
			continue
		}
		s.out = m.encodePiece(s.out[:0], text, &s)
		if len(s.out) != 2 {
			return nil, fmt.Errorf("token %d %q is %d tokens before its own merge; it must be 2", i, text, len(s.out))
		}
		m.merges[pairKey(s.out[0], s.out[1])] = merge{int32(i), int32(i)}
	}
	return m, m.checkBytes()
}

// checkBytes checks that every byte of UTF-8 has a token; otherwise encoding would lose text.
func (m *bpe) checkBytes() error {
	for b, t := range m.byteToken {
		inUTF8 := b < 0xC0 || b >= 0xC2 && b <= 0xF4
		if t < 0 && inUTF8 {
			return fmt.Errorf("the vocabulary has no token for byte %#02x; a BPE on bytes, or with byte_fallback, has one for each", b)
		}
	}
	return nil
}

// scratch is an encoder's working memory.
type scratch struct {
	start   []int32
	symbols []symbol
	queue   mergeQueue
	out     []int32
	cache   map[string][]int32
}

// symbol is a token of the piece during merging, in a linked list.
type symbol struct {
	token      int32 // -1: merged into the one before
	prev, next int32 // index, or -1
}

// candidate is a merge of the symbol at pos with the next one.
type candidate struct {
	rank, pos, token int32
}

type mergeQueue []candidate

func (q mergeQueue) Len() int { return len(q) }
func (q mergeQueue) Less(i, j int) bool {
	return q[i].rank < q[j].rank || q[i].rank == q[j].rank && q[i].pos < q[j].pos
}
func (q mergeQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *mergeQueue) Push(x any)   { *q = append(*q, x.(candidate)) }
func (q *mergeQueue) Pop() any {
	last := len(*q) - 1
	x := (*q)[last]
	*q = (*q)[:last]
	return x
}

// start appends the tokens of a piece before any merge: at most one a byte.
func (m *bpe) start(dst []int32, piece string) []int32 {
	if m.chars == nil {
		for i := range len(piece) {
			if t := m.byteToken[piece[i]]; t >= 0 {
				dst = append(dst, t)
			}
		}
		return dst
	}
	for i, r := range piece {
		if t, ok := m.chars[r]; ok {
			dst = append(dst, t)
			continue
		}
		for _, b := range []byte(piece[i : i+utf8.RuneLen(r)]) {
			dst = append(dst, m.byteToken[b])
		}
	}
	return dst
}

// shortPiece is the longest piece, in bytes, for which scanning all pairs for each merge is
// faster than a priority queue.
const shortPiece = 48

// longPiece is the longest piece, in bytes, that is merged at once: merging needs up to 100 bytes
// of memory for each byte. A longer piece is no word of a human language; it is merged in parts.
const longPiece = 1 << 20

// encodePiece appends the tokens of a piece to dst.
func (m *bpe) encodePiece(dst []int32, piece string, s *scratch) []int32 {
	for len(piece) > longPiece {
		n := longPiece
		for !utf8.RuneStart(piece[n]) {
			n--
		}
		dst, piece = m.encodePart(dst, piece[:n], s), piece[n:]
	}
	return m.encodePart(dst, piece, s)
}

// encodePart appends the tokens of a piece of at most longPiece bytes. It takes O(n log n) time
// for n bytes.
func (m *bpe) encodePart(dst []int32, piece string, s *scratch) []int32 {
	if m.whole != nil {
		if t, ok := m.whole[piece]; ok {
			return append(dst, t)
		}
	}
	if len(piece) <= shortPiece {
		return m.encodeShort(dst, piece)
	}
	s.symbols, s.start = s.symbols[:0], m.start(s.start[:0], piece)
	for i, t := range s.start {
		s.symbols = append(s.symbols, symbol{t, int32(i) - 1, int32(i) + 1})
	}
	if len(s.symbols) == 0 {
		return dst
	}
	s.symbols[len(s.symbols)-1].next = -1
	s.queue = s.queue[:0]
	for i := range s.symbols[1:] {
		if c, ok := m.merges[pairKey(s.symbols[i].token, s.symbols[i+1].token)]; ok {
			s.queue = append(s.queue, candidate{c.rank, int32(i), c.token})
		}
	}
	heap.Init(&s.queue)
	push := func(left int32) {
		if left < 0 || s.symbols[left].next < 0 {
			return
		}
		if c, ok := m.merges[pairKey(s.symbols[left].token, s.symbols[s.symbols[left].next].token)]; ok {
			heap.Push(&s.queue, candidate{c.rank, left, c.token})
		}
	}
	for len(s.queue) > 0 {
		top := heap.Pop(&s.queue).(candidate)
		left := &s.symbols[top.pos]
		if left.token < 0 || left.next < 0 {
			continue
		}
		right := &s.symbols[left.next]
		// The pair may have changed since it was queued.
		if c, ok := m.merges[pairKey(left.token, right.token)]; !ok || c.rank != top.rank {
			continue
		}
		left.token, right.token = top.token, -1
		left.next = right.next
		if left.next >= 0 {
			s.symbols[left.next].prev = top.pos
		}
		push(left.prev)
		push(top.pos)
	}
	for i := int32(0); i >= 0; i = s.symbols[i].next {
		dst = append(dst, s.symbols[i].token)
	}
	return dst
}

func (m *bpe) encodeShort(dst []int32, piece string) []int32 {
	var tokens [shortPiece]int32
	var merges [shortPiece]merge // of tokens[i] and tokens[i+1]
	n := len(m.start(tokens[:0], piece))
	const none = 1<<31 - 1
	look := func(i int) merge {
		if c, ok := m.merges[pairKey(tokens[i], tokens[i+1])]; ok {
			return c
		}
		return merge{rank: none}
	}
	for i := range n - 1 {
		merges[i] = look(i)
	}
	for n > 1 {
		best := 0
		for i := 1; i < n-1; i++ {
			if merges[i].rank < merges[best].rank {
				best = i
			}
		}
		if merges[best].rank == none {
			break
		}
		tokens[best] = merges[best].token
		copy(tokens[best+1:n-1], tokens[best+2:n])
		copy(merges[best:n-2], merges[best+1:n-1])
		n--
		if best > 0 {
			merges[best-1] = look(best - 1)
		}
		if best < n-1 {
			merges[best] = look(best)
		}
	}
	return append(dst, tokens[:n]...)
}

// splitter is a stage that splits non-empty valid UTF-8 into pieces; merges stay within a
// piece. If both functions are nil the text is one piece.
type splitter struct {
	prefixSpace bool                                  // first put a space before a text that starts with another character
	first       func(text string) int                 // the length of the first piece, or
	all         func(text string, yield func(string)) // every piece
}

// added is a token that is matched in the text before normalization, splitting and merges.
type added struct {
	content                    string
	token                      int32
	singleWord, lstrip, rstrip bool
}

// addedSet finds added tokens, the longest one where several start at the same place.
type addedSet struct {
	byFirst map[byte][]added // longest first
	first   [256]bool
}

func newAddedSet(list []added) *addedSet {
	if len(list) == 0 {
		return nil
	}
	s := &addedSet{byFirst: map[byte][]added{}}
	for _, a := range list {
		s.first[a.content[0]] = true
		s.byFirst[a.content[0]] = append(s.byFirst[a.content[0]], a)
	}
	for _, l := range s.byFirst {
		slices.SortStableFunc(l, func(a, b added) int { return len(b.content) - len(a.content) })
	}
	return s
}

func (s *addedSet) match(text string) *added {
	l := s.byFirst[text[0]]
	for i := range l {
		if strings.HasPrefix(text, l[i].content) {
			return &l[i]
		}
	}
	return nil
}

// wordChars is a regular expression's \w.
var wordChars = []*unicode.RangeTable{unicode.L, unicode.Nl, unicode.M, unicode.Nd, unicode.Pc, unicode.Other_Alphabetic, unicode.Join_Control}

// sections splits text at added tokens. It calls plain and token in the order of the text, with
// the bounds of each section in bytes.
func (s *addedSet) sections(text string, plain func(begin, end int), token func(id int32, begin, end int)) {
	done := 0
	for i := 0; i < len(text); {
		if !s.first[text[i]] {
			i++
			continue
		}
		a := s.match(text[i:])
		if a == nil {
			i++
			continue
		}
		begin, end := i, i+len(a.content)
		i = end
		if a.singleWord {
			before, _ := utf8.DecodeLastRuneInString(text[:begin])
			after, _ := utf8.DecodeRuneInString(text[end:])
			if begin > 0 && unicode.In(before, wordChars...) || end < len(text) && unicode.In(after, wordChars...) {
				continue
			}
		}
		if a.lstrip {
			begin = max(done, len(strings.TrimRightFunc(text[:begin], unicode.IsSpace)))
		}
		if a.rstrip {
			end = len(text) - len(strings.TrimLeftFunc(text[end:], unicode.IsSpace))
		}
		if begin > done {
			plain(done, begin)
		}
		token(a.token, begin, end)
		done = end
	}
	if done < len(text) {
		plain(done, len(text))
	}
}
