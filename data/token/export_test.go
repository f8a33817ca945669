package token

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestHuggingFace exports the built-in tokenizers and loads the files; the loaded tokenizers must
// give the same tokens.
func TestHuggingFace(t *testing.T) {
	text := "Hello, world! The quick brown fox's 123 jumps;\n\tüber — “quoted” 中文 🙂 a\u0301 " + strings.Repeat("abc ", 50)
	for _, tok := range []Tokenizer{Bytes(), GPT2()} {
		file, err := HuggingFace(tok)
		require.NoError(t, err)
		path := filepath.Join(t.TempDir(), "tokenizer.json")
		require.NoError(t, os.WriteFile(path, file, 0o644))
		back, err := Load(path)
		require.NoError(t, err)
		require.Equal(t, tok.Encode(text), back.Encode(text))
		require.Equal(t, tok.VocabSize(), back.VocabSize())
		require.Equal(t, tok.EOT(), back.EOT())
		require.Equal(t, text, back.Decode(back.Encode(text)))
	}
	path := filepath.Join(t.TempDir(), "tokenizer.json")
	file, err := HuggingFace(Bytes())
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, file, 0o644))
	back, err := Load(path)
	require.NoError(t, err)
	require.Equal(t, Bytes(), back, "the bytes' own tokenizer takes what is not UTF-8 too")
	own, err := Load("testdata/tokenizer-gpt2.json")
	require.NoError(t, err)
	_, err = HuggingFace(own)
	require.ErrorContains(t, err, "copy that")
}
