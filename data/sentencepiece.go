package data

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// spaceMark is how SentencePiece spells a space in its tokens.
const spaceMark = "▁"

// normalizer is one normalization step: NFC, a text put before the input, or a text replaced by
// another.
type normalizer struct {
	nfc      bool
	prepend  string
	from, to string
}

// normalized runs the normalizers over non-empty text. continues says that text follows a cut,
// so that nothing is put before it.
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

// addNormalizer accepts NFC, Prepend and Replace of a space. This package does not implement
// others.
func (t *bpeTokenizer) addNormalizer(s *hfStage) error {
	if s == nil {
		return nil
	}
	switch s.Type {
	case "NFC":
		t.normalize = append(t.normalize, normalizer{nfc: true})
	case "Prepend":
		if s.Prepend != spaceMark {
			return fmt.Errorf("normalizer Prepend puts %.80q before a text; only %q is supported", s.Prepend, spaceMark)
		}
		t.normalize = append(t.normalize, normalizer{prepend: s.Prepend})
	case "Replace":
		if s.Pattern == nil || s.Pattern.String == nil || *s.Pattern.String != " " || s.Content != spaceMark {
			return fmt.Errorf("normalizer Replace is supported only from the String %q to %q", " ", spaceMark)
		}
		t.normalize = append(t.normalize, normalizer{from: " ", to: spaceMark})
	case "Sequence":
		for _, sub := range s.Normalizers {
			if err := t.addNormalizer(sub); err != nil {
				return err
			}
		}
	default:
		return fmt.Errorf("normalizer %.80q is not supported; it must be null, NFC, or Prepend and Replace of spaces", s.Type)
	}
	return nil
}

// metaspace is what a SentencePiece-style BPE has in place of patterns: spaces are
// the character ▁, and merges may go over them.
type metaspace struct {
	model *bpe
	// here says that the Metaspace pre-tokenizer, not a normalizer, turns spaces into ▁. scheme
	// says where it also puts a ▁ before text that lacks one: always (before a text and after
	// each added token), first (before a text) or never.
	here   bool
	scheme string
	// split says that every ▁ starts a piece. Without it whole texts are merged. joined are the
	// characters that some token has directly before a ▁; after any other character a token
	// always ends there, so a piece may too.
	split  bool
	joined map[rune]bool
}

// apply prepares a section of a text for merging. first says that it starts the text, continues
// that it follows a cut.
func (m *metaspace) apply(text string, first, continues bool) string {
	if !m.here {
		return text
	}
	text = strings.ReplaceAll(text, " ", spaceMark)
	if (m.scheme == "always" && !continues || m.scheme == "first" && first) && !strings.HasPrefix(text, spaceMark) {
		text = spaceMark + text
	}
	return text
}

// apart says that no token has r right before a ▁.
func (m *metaspace) apart(r rune) bool {
	if _, ok := m.model.chars[r]; !ok {
		r = '>' // of the last byte's token, <0xNN>
	}
	return m.split || !m.joined[r]
}

// first returns the length of the first piece.
func (m *metaspace) first(text string) int {
	var before rune
	for i, r := range text {
		if i > 0 && r == '▁' && (m.split || before != '▁' && m.apart(before)) {
			return i
		}
		before = r
	}
	return len(text)
}

// addSentencePiece makes t a SentencePiece-style BPE: it sets its characters, its handling of
// spaces and its pieces.
func (t *bpeTokenizer) addSentencePiece(h *hfModel, pre *hfStage, vocab map[string]int32) error {
	m := &metaspace{model: t.model}
	replaced := slices.ContainsFunc(t.normalize, func(n normalizer) bool { return n.from == " " })
	switch {
	case h.IgnoreMerges:
		return errors.New("the model has both byte_fallback and ignore_merges, which is not supported")
	case pre != nil && pre.Type != "Metaspace":
		return fmt.Errorf("pre_tokenizer %.80q is not supported with byte_fallback; it must be null or Metaspace", pre.Type)
	case pre == nil && !replaced:
		return fmt.Errorf("nothing makes spaces %q: neither a normalizer Replace nor a pre_tokenizer Metaspace", spaceMark)
	case pre != nil:
		if err := m.preTokenizer(pre); err != nil {
			return err
		}
	}
	t.model.chars = map[rune]int32{}
	for token, id := range vocab {
		if r, n := utf8.DecodeRuneInString(token); n == len(token) && r != utf8.RuneError {
			t.model.chars[r] = id
		}
	}
	m.joined = map[rune]bool{}
	for token := range vocab {
		var before rune
		for i, r := range token {
			if i > 0 && r == '▁' && before != '▁' {
				m.joined[before] = true
			}
			before = r
		}
	}
	t.meta = m
	t.split = []splitter{{first: m.first}}
	return nil
}

func (m *metaspace) preTokenizer(s *hfStage) error {
	if s.Replacement != "" && s.Replacement != spaceMark {
		return fmt.Errorf("pre_tokenizer Metaspace has replacement %.80q; only %q is supported", s.Replacement, spaceMark)
	}
	m.here, m.scheme, m.split = true, s.PrependScheme, s.Split == nil || *s.Split
	switch {
	case m.scheme == "" && s.AddPrefixSpace != nil && !*s.AddPrefixSpace:
		m.scheme = "never"
	case m.scheme == "":
		m.scheme = "always"
	case m.scheme != "always" && m.scheme != "first" && m.scheme != "never":
		return fmt.Errorf("pre_tokenizer Metaspace has prepend_scheme %.80q; it must be always, first or never", m.scheme)
	}
	return nil
}

// checkDecoder checks that a decoder is that of a SentencePiece-style BPE: ▁ is a space, <0xNN>
// a byte. Strip would remove a space at the start of a text; Decode keeps it, since decoded
// texts follow one another.
func (s *hfStage) checkDecoder(depth int) error {
	ok := false
	switch {
	case s == nil || depth > 8:
	case s.Type == "Sequence":
		for _, sub := range s.Decoders {
			if err := sub.checkDecoder(depth + 1); err != nil {
				return err
			}
		}
		ok = true
	case s.Type == "Replace":
		ok = s.Pattern != nil && s.Pattern.String != nil && *s.Pattern.String == spaceMark && s.Content == " "
	case s.Type == "Strip":
		ok = s.Content == " " && s.Start <= 1 && s.Stop == 0
	default:
		ok = s.Type == "ByteFallback" || s.Type == "Fuse" || s.Type == "Metaspace"
	}
	if !ok {
		return errors.New("the decoder is not that of a SentencePiece-style BPE, which is Replace of ▁ by a space, ByteFallback, Fuse and Strip, or Metaspace")
	}
	return nil
}

// byteOf returns the byte that a byte_fallback token <0xNN> means.
func byteOf(token string) (byte, bool) {
	var b byte
	if len(token) != len("<0x00>") {
		return 0, false
	}
	if _, err := fmt.Sscanf(token, "<0x%02X>", &b); err != nil || token != fmt.Sprintf("<0x%02X>", b) {
		return 0, false
	}
	return b, true
}

// spelledAs returns the text that a SentencePiece token spells.
func spelledAs(token string) string {
	if b, ok := byteOf(token); ok {
		return string([]byte{b})
	}
	return strings.ReplaceAll(token, spaceMark, " ")
}
