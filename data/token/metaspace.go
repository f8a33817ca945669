package token

import "strings"

// spaceMark is SentencePiece's spelling of a space in its tokens.
const spaceMark = "▁"

// normalizer is one normalization step: NFC, a prefix, or a replacement.
type normalizer struct {
	nfc      bool
	prepend  string
	from, to string
}

// metaspace replaces the patterns in a SentencePiece-style BPE. Spaces are the character ▁, and
// merges may cross them.
type metaspace struct {
	model *bpe
	// here says that the Metaspace pre-tokenizer, not a normalizer, replaces spaces by ▁. scheme
	// says where it also adds a ▁ before text that lacks one: always (before a text and after each
	// added token), first (before a text) or never.
	here   bool
	scheme string
	// split says that every ▁ starts a piece. Without it complete texts are merged. joined are the
	// characters that some token has directly before a ▁; after any other character a token always
	// ends there, so a piece may too.
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
		r = '>' // the last character of a byte token, <0xNN>
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
