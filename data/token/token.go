// Package token converts text to tokens and back: bytes, GPT-2, and tokenizers of the Hugging Face
// format.
package token

import (
	"encoding/json"
	"strings"
)

// Tokenizer converts text to tokens and back. Its methods may be called concurrently.
type Tokenizer interface {
	// Name identifies the tokenizer. Tokenizers with equal names produce equal tokens.
	Name() string
	// VocabSize is larger than every token that Encode returns.
	VocabSize() int
	// Encode returns the tokens of text. Bytes that are not UTF-8 count as U+FFFD, except in
	// the tokenizer of bytes.
	Encode(text string) []int32
	// Decode returns the text of tokens. A token that is a part of a character gives its bytes, so
	// decoded parts can be concatenated. A token out of range gives U+FFFD.
	Decode(tokens []int32) string
	// EOT returns the token that ends a document, or -1 if there is none.
	EOT() int32
}

// Cutter is a Tokenizer that can encode a text in parts.
type Cutter interface {
	// Cut returns the largest c, from < c ≤ len(text), at which text can be cut: the tokens of
	// text[:c], followed by the tokens from EncodeMore of text[c:] and any later text, are those of
	// the complete text. It returns 0 if it knows no such c. text[:from], without its last
	// character, was searched before.
	Cut(text []byte, from int) int
	// Within returns a place to cut a long text in which Cut finds none. The place is between
	// characters, and the tokens may differ from those of the complete text. It returns 0 if Cut
	// has no rule for this tokenizer.
	Within(text []byte) int
	// EncodeMore encodes the text after a cut, without the prefix that Encode adds before a text.
	EncodeMore(text string) []int32
}

// Bytes returns the tokenizer whose tokens are the bytes of the text.
func Bytes() Tokenizer { return byteTokenizer{} }

type byteTokenizer struct{}

func (byteTokenizer) Name() string   { return "bytes" }
func (byteTokenizer) VocabSize() int { return 256 }
func (byteTokenizer) EOT() int32     { return -1 }

func (byteTokenizer) Cut(text []byte, _ int) int { return len(text) }
func (byteTokenizer) Within(text []byte) int     { return len(text) }

func (byteTokenizer) Encode(text string) []int32 {
	out := make([]int32, len(text))
	for i := range len(text) {
		out[i] = int32(text[i])
	}
	return out
}

func (byteTokenizer) EncodeMore(text string) []int32 { return Bytes().Encode(text) }

func (byteTokenizer) Decode(tokens []int32) string {
	var out strings.Builder
	for _, t := range tokens {
		if t < 0 || t > 255 {
			out.WriteString("\uFFFD")
		} else {
			out.WriteByte(byte(t))
		}
	}
	return out.String()
}

// Specials are the special tokens of a tokenizer and the chat template, as the files
// beside its tokenizer.json name them.
type Specials struct {
	BOS, Pad int32 // -1: none
	// Ends are the tokens at which generation stops. The first ends a document.
	Ends []int32
	// Names holds the text of each named token: bos_token, eos_token, pad_token, …
	Names map[string]string
	// Template is the Jinja source of the chat template; "" if there is none.
	Template string
	// IDs are the raw bos_token_id, eos_token_id and pad_token_id of config.json.
	IDs map[string]json.RawMessage
	// Notes are contradictions between the files, a sentence each.
	Notes []string
}

// ModelIDs returns bos_token_id, eos_token_id and pad_token_id for an exported config.json: the
// original values, otherwise those of the named tokens.
func (s *Specials) ModelIDs() map[string]any {
	out := map[string]any{}
	if s.BOS >= 0 {
		out["bos_token_id"] = s.BOS
	}
	if s.Pad >= 0 {
		out["pad_token_id"] = s.Pad
	}
	switch len(s.Ends) {
	case 0:
	case 1:
		out["eos_token_id"] = s.Ends[0]
	default:
		out["eos_token_id"] = s.Ends
	}
	for key, value := range s.IDs {
		out[key] = value
	}
	return out
}
