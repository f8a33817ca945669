package token

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

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
