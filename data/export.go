package data

import (
	"encoding/json"
	"fmt"
	"slices"
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

// tokenizerText is the tokenizer.json of a byte-level BPE. words says that text is first split
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
