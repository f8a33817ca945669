package data

import (
	"fmt"
	"os"
	"strings"
	"sync"

	"github.com/tiktoken-go/tokenizer/codec"
)

// Tokenizer turns text into tokens and back. Its methods may be called concurrently.
type Tokenizer interface {
	// Name identifies the tokenizer: runs with equal names see equal tokens.
	Name() string
	// VocabSize is larger than every token that Encode returns.
	VocabSize() int
	// Encode returns the tokens of text. Bytes that are not UTF-8 count as U+FFFD, except in
	// the tokenizer of bytes.
	Encode(text string) []int32
	// Decode returns the text of tokens. Tokens of part of a character give its bytes, so that
	// decoded parts concatenate. A token out of range gives U+FFFD.
	Decode(tokens []int32) string
	// EOT is the token that ends a document, or -1 if there is none.
	EOT() int32
}

// cutter is a Tokenizer that can encode a text in parts.
type cutter interface {
	// cut returns the largest c, from < c ≤ len(text), at which text can be cut: the tokens of
	// text[:c] followed by those of text[c:] and of whatever follows are those of the whole. A
	// continuer encodes the second part by encodeMore. It returns 0 if it knows no such c.
	// text[:from], without its last character, was searched before.
	cut(text []byte, from int) int
	// within returns a place to cut a long text in which cut finds none. It lies between
	// characters, and the tokens may differ from those of the whole. It returns 0 if cut has no
	// rule for this tokenizer.
	within(text []byte) int
}

// continuer is a cutter whose Encode puts something before a text. Its encodeMore encodes the
// text after a cut, without that.
type continuer interface{ encodeMore(text string) []int32 }

// OpenTokenizer opens a tokenizer by name (bytes or gpt2, in any case) or by the path of a
// Hugging Face tokenizer.json (see LoadTokenizer).
func OpenTokenizer(spec string) (Tokenizer, error) {
	switch strings.ToLower(spec) {
	case "bytes":
		return Bytes(), nil
	case "gpt2":
		return GPT2(), nil
	case ByteChatName:
		return ByteChat(), nil
	case "":
		return nil, fmt.Errorf("open tokenizer: the name is empty; it must be bytes, gpt2 or a tokenizer.json")
	}
	if _, err := os.Stat(spec); os.IsNotExist(err) {
		return nil, fmt.Errorf("open tokenizer: %q is neither bytes nor gpt2, and there is no such file; it must be bytes, gpt2 or a tokenizer.json", spec)
	}
	return LoadTokenizer(spec)
}

// Bytes is the tokenizer whose tokens are the bytes of the text.
func Bytes() Tokenizer { return byteTokenizer{} }

type byteTokenizer struct{}

func (byteTokenizer) Name() string   { return "bytes" }
func (byteTokenizer) VocabSize() int { return 256 }
func (byteTokenizer) EOT() int32     { return -1 }

func (byteTokenizer) cut(text []byte, _ int) int { return len(text) }
func (byteTokenizer) within(text []byte) int     { return len(text) }

func (byteTokenizer) Encode(text string) []int32 {
	out := make([]int32, len(text))
	for i := range len(text) {
		out[i] = int32(text[i])
	}
	return out
}

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

// gpt2EOT is <|endoftext|>. Encode treats that spelling as plain text, so it never returns the
// token.
const gpt2EOT = 50256

// GPT2 is GPT-2's byte-level BPE of 50,257 tokens (Radford et al. 2019). The vocabulary is
// embedded in tiktoken-go. The encoder is this package's, since tiktoken-go's takes time
// quadratic in a word's length.
var GPT2 = sync.OnceValue(func() Tokenizer {
	ranked := codec.NewR50kBase()
	tokens := make([]string, gpt2EOT+1)
	for i := range tokens[:gpt2EOT] {
		text, err := ranked.Decode([]uint{uint(i)})
		if err != nil {
			panic(fmt.Sprintf("tiktoken-go's r50k_base lacks token %d: %v", i, err))
		}
		tokens[i] = text
	}
	model, err := bpeFromRanks(tokens[:gpt2EOT])
	if err != nil {
		panic(fmt.Sprintf("tiktoken-go's r50k_base: %v", err))
	}
	model.tokens = append(model.tokens, "<|endoftext|>")
	return &bpeTokenizer{name: "gpt2", model: model, split: []splitter{{first: splitGPT2}}, eot: gpt2EOT, cuttable: true,
		specials: Specials{BOS: gpt2EOT, Pad: -1, Ends: []int32{gpt2EOT}, Names: map[string]string{"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}}}
})
