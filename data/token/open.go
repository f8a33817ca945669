package token

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/tiktoken-go/tokenizer/codec"
)

// Open opens a tokenizer by name (bytes or gpt2, in any case) or by the path of a
// Hugging Face tokenizer.json (see Load).
func Open(spec string) (Tokenizer, error) {
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
	return Load(spec)
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

// ByteChat is Bytes with an end token, 256, and a chat template: for each message <|user|> or
// another role, then the content, and after an answer the end token.
var ByteChat = sync.OnceValue(func() Tokenizer {
	text, err := tokenizerText(byteVocab(), nil, []any{addedToken(256, byteEnd)}, false)
	if err != nil {
		panic(err)
	}
	t, err := parse(text, nil)
	if err != nil {
		panic(err)
	}
	t.name = ByteChatName
	t.specials.Template = `{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}`
	t.specials.Names = map[string]string{"eos_token": byteEnd}
	return t
})

const (
	// ByteChatName is ByteChat's name in Open.
	ByteChatName = "bytes-chat"
	byteEnd      = "<|endoftext|>"
)

// HuggingFace returns the text of a tokenizer.json equivalent to a built-in tokenizer: Bytes,
// ByteChat or GPT2. Other tokenizers were loaded from such a file already.
func HuggingFace(tok Tokenizer) ([]byte, error) {
	switch t := tok.(type) {
	case byteTokenizer:
		return tokenizerText(byteVocab(), nil, nil, false)
	case *bpeTokenizer:
		switch t {
		case GPT2():
			return t.model.huggingFace(t.eot)
		case ByteChat():
			return tokenizerText(byteVocab(), nil, []any{addedToken(256, byteEnd)}, false)
		}
	}
	return nil, fmt.Errorf("tokenizer %s came from a tokenizer.json: copy that", tok.Name())
}

// huggingFace returns the tokenizer.json of a model whose last token is special and whose other
// tokens come from merges.
func (m *bpe) huggingFace(special int32) ([]byte, error) {
	spelled := func(id int32) string {
		var out []rune
		for _, b := range []byte(m.tokens[id]) {
			out = append(out, byteChars[b])
		}
		return string(out)
	}
	vocab := map[string]int{}
	for id := range special {
		vocab[spelled(id)] = int(id)
	}
	type ranked struct {
		rank int32
		pair [2]string
	}
	var merges []ranked
	for key, c := range m.merges {
		merges = append(merges, ranked{c.rank, [2]string{spelled(int32(key >> 32)), spelled(int32(uint32(key)))}})
	}
	slices.SortFunc(merges, func(a, b ranked) int { return int(a.rank - b.rank) })
	pairs := make([][2]string, len(merges))
	for i, r := range merges {
		pairs[i] = r.pair
	}
	return tokenizerText(vocab, pairs, []any{addedToken(special, m.tokens[special])}, true)
}

func addedToken(id int32, content string) map[string]any {
	return map[string]any{"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}
}

// byteVocab is the vocabulary of the 256 bytes.
func byteVocab() map[string]int {
	vocab := map[string]int{}
	for b, r := range byteChars {
		vocab[string(r)] = b
	}
	return vocab
}

// tokenizerText returns the tokenizer.json of a byte-level BPE. words says that text is first split
// into words.
func tokenizerText(vocab map[string]int, merges [][2]string, added []any, words bool) ([]byte, error) {
	if merges == nil {
		merges = [][2]string{}
	}
	if added == nil {
		added = []any{}
	}
	level := map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": words}
	return json.Marshal(map[string]any{
		"version": "1.0", "truncation": nil, "padding": nil, "normalizer": nil, "added_tokens": added,
		"pre_tokenizer": level, "post_processor": nil, "decoder": level,
		"model": map[string]any{"type": "BPE", "dropout": nil, "unk_token": nil, "continuing_subword_prefix": nil, "end_of_word_suffix": nil,
			"fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": merges},
	})
}
