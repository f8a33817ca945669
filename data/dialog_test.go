package data

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/data/token"
)

// TestReadQuestions checks the prompts read from text lines and from each form of JSON record.
func TestReadQuestions(t *testing.T) {
	write := func(name, text string) string {
		path := filepath.Join(t.TempDir(), name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
		return path
	}
	tok := token.ByteChat()
	d, err := NewDialog(tok, "")
	require.NoError(t, err)
	tokens := func(text string) []int32 { return token.Bytes().Encode(text) }

	path := write("a.txt", "one\n\n  two words \n")
	got, err := ReadQuestions(path, tok, nil)
	require.NoError(t, err)
	require.Equal(t, []Question{{Prompt: tokens("one"), Text: "one", Place: path + ":1"}, {Prompt: tokens("two words"), Text: "two words", Place: path + ":3"}}, got)
	got, err = ReadQuestions(path, tok, d)
	require.NoError(t, err)
	require.Equal(t, tokens("<|user|>one<|assistant|>"), got[0].Prompt)

	path = write("a.jsonl", `{"prompt": "x"}
{"prompt": "1 + 1?", "response": "2"}
{"instruction": "add", "input": "2", "output": "3"}
{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}, {"role": "user", "content": "e"}]}
{"messages": [{"role": "user", "content": "alone"}]}
`)
	got, err = ReadQuestions(path, tok, d)
	require.NoError(t, err)
	require.Equal(t, []Question{
		{Prompt: tokens("<|user|>x<|assistant|>"), Text: "x", Place: path + ":1"},
		{Prompt: tokens("<|user|>1 + 1?<|assistant|>"), Text: "1 + 1?", Answer: "2", Answered: true, Place: path + ":2"},
		{Prompt: tokens("<|user|>add\n\n2<|assistant|>"), Text: "add\n\n2", Answer: "3", Answered: true, Place: path + ":3"},
		{Prompt: append(append(tokens("<|user|>a<|assistant|>b"), 256), tokens("<|user|>c<|assistant|>")...), Text: "c", Answer: "d", Answered: true, Place: path + ":4"},
		{Prompt: tokens("<|user|>alone<|assistant|>"), Text: "alone", Place: path + ":5"},
	}, got)

	for text, said := range map[string]string{
		`{"prompt": "a", "response": "b"}`: "needs a chat template",
		`{"text": "a"}`:                    "no text as its field prompt",
		`{"prompt": ""}`:                   "the prompt is empty",
		`[1]`:                              "not a JSON object",
		`{"messages": [{"role": "assistant", "content": "first"}]}`: "needs a chat template",
		"": "holds no prompt",
	} {
		path := write("b.jsonl", text)
		_, err := ReadQuestions(path, tok, nil)
		require.ErrorContains(t, err, said, text)
		require.ErrorContains(t, err, path)
	}
	_, err = ReadQuestions(write("c.jsonl", `{"messages": [{"role": "assistant", "content": "first"}]}`), tok, d)
	require.ErrorContains(t, err, "begins with an answer")
	_, err = ReadQuestions(filepath.Join(t.TempDir(), "none"), tok, d)
	require.ErrorContains(t, err, "none")
	_, err = NewDialog(token.Bytes(), "")
	require.Error(t, err)
}
