package token

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// put writes a file in a folder of the test.
func put(t testing.TB, name string, content []byte) string {
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, content, 0o644))
	return path
}

// spell is the inverse of unspell.
func spell(bytes string) string {
	var out []rune
	for i := range len(bytes) {
		out = append(out, byteChars[bytes[i]])
	}
	return string(out)
}

// tokenizerJSON returns a tokenizer.json as a map, so that tests can change it. It has the first n
// tokens of m, their merges, and one special token.
func tokenizerJSON(t testing.TB, m *bpe, n int, pre any, ignoreMerges bool, special string) map[string]any {
	vocab := map[string]int{}
	for i, text := range m.tokens[:n] {
		vocab[spell(text)] = i
	}
	type ranked struct {
		rank int32
		pair [2]string
	}
	var merges []ranked
	for key, c := range m.merges {
		if int(c.token) < n {
			merges = append(merges, ranked{c.rank, [2]string{spell(m.tokens[key>>32]), spell(m.tokens[uint32(key)])}})
		}
	}
	slices.SortFunc(merges, func(a, b ranked) int { return int(a.rank - b.rank) })
	pairs := make([][2]string, len(merges))
	for i, r := range merges {
		pairs[i] = r.pair
	}
	return map[string]any{
		"version": "1.0", "truncation": nil, "padding": nil, "normalizer": nil,
		"added_tokens":  []any{map[string]any{"id": n, "content": special, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}},
		"pre_tokenizer": pre,
		"decoder":       map[string]any{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
		"model":         map[string]any{"type": "BPE", "dropout": nil, "unk_token": nil, "continuing_subword_prefix": nil, "end_of_word_suffix": nil, "fuse_unk": false, "byte_fallback": false, "ignore_merges": ignoreMerges, "vocab": vocab, "merges": pairs},
	}
}

var byteLevel = map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}

func byteLevelAfter(stages ...any) map[string]any {
	return map[string]any{"type": "Sequence", "pretokenizers": append(stages, map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false})}
}

func splitStage(pattern string) map[string]any {
	return map[string]any{"type": "Split", "pattern": map[string]any{"Regex": pattern}, "behavior": "Isolated", "invert": false}
}

func marshal(t testing.TB, v any) []byte {
	out, err := json.Marshal(v)
	require.NoError(t, err)
	return out
}

func load(t testing.TB, v any) *bpeTokenizer {
	tok, err := parse(marshal(t, v), nil)
	require.NoError(t, err)
	return tok
}
