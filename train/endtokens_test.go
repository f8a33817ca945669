package train

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/data/token"
	"github.com/spillway-ml/spillway/planner"
)

// withEnds writes a byte tokenizer in which the given bytes are special tokens, and further files
// that name the end tokens. It returns the tokenizer's path.
func withEnds(t *testing.T, dir string, special string, files map[string]any) string {
	t.Helper()
	text, err := token.HuggingFace(token.Bytes())
	require.NoError(t, err)
	var m map[string]any
	require.NoError(t, json.Unmarshal(text, &m))
	var added []any
	for _, c := range special {
		added = append(added, map[string]any{"id": c, "content": string(c), "special": true})
	}
	m["added_tokens"] = added
	path := filepath.Join(dir, planner.TokenizerFile)
	write := func(path string, v any) {
		out, err := json.Marshal(v)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(path, out, 0o644))
	}
	write(path, m)
	for name, v := range files {
		write(filepath.Join(dir, name), v)
	}
	return path
}

// TestGenerationStopsAtAnyEnd checks that generation stops at the first of several end tokens.
func TestGenerationStopsAtAnyEnd(t *testing.T) {
	t.Parallel()
	text := func(tokenizer string) string {
		c := generation("llama-tied", 40)
		c.Tokenizer = tokenizer
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		defer tr.Close()
		var out strings.Builder
		_, err = tr.GenerateTo(context.Background(), "the ", 30, Sampling{Temperature: 3, Seed: 2}, func(s string) error { out.WriteString(s); return nil })
		require.NoError(t, err)
		return out.String()
	}
	whole := text("bytes")
	at := strings.LastIndexFunc(whole, func(r rune) bool { return r > ' ' && r < 127 && strings.IndexRune(whole, r) > 3 })
	require.Positive(t, at, "%q", whole)
	end, other := whole[at], byte('!')
	for strings.IndexByte(whole, other) >= 0 {
		other++
	}
	tokenizer := withEnds(t, t.TempDir(), string(other)+string(end), map[string]any{"tokenizer_config.json": map[string]any{"eos_token": string(other)},
		"generation_config.json": map[string]any{"eos_token_id": []int{int(other), int(end)}}})
	require.Equal(t, whole[:strings.IndexByte(whole, end)], text(tokenizer))
}

// TestCheckpointKeepsSpecials checks that a checkpoint keeps the special tokens of the model's
// files, including config.json. A note must report training data without the end token.
func TestCheckpointKeepsSpecials(t *testing.T) {
	t.Parallel()
	c := keeping(t, 1)
	c.Ranks = 1
	dir := t.TempDir()
	config, err := os.ReadFile("../testdata/llama-tied/config.json")
	require.NoError(t, err)
	var shape map[string]any
	require.NoError(t, json.Unmarshal(config, &shape))
	for key, value := range map[string]any{"bos_token_id": 1, "eos_token_id": []any{124.0, 126.0}, "pad_token_id": nil} {
		shape[key] = value
	}
	beside := map[string]any{
		"config.json":             shape,
		"generation_config.json":  map[string]any{"eos_token_id": []any{124.0, 126.0}, "temperature": 0.5},
		"tokenizer_config.json":   map[string]any{"eos_token": "~", "chat_template": "{{ messages }}", "added_tokens_decoder": map[string]any{}},
		"special_tokens_map.json": map[string]any{"eos_token": "~"},
	}
	c.Tokenizer = withEnds(t, dir, "|~", beside)
	c.Model, c.Init = dir, "random"
	c.Data = filepath.Join(t.TempDir(), "text.txt")
	require.NoError(t, os.WriteFile(c.Data, []byte(strings.Repeat("no end in sight ", 20)), 0o644))
	notes := strings.Join(ended(t, c), "\n")
	require.Contains(t, notes, `the end token "~" (126) never occurs`)
	require.Contains(t, notes, "config.json names token 1 as bos_token_id")
	saved := filepath.Join(c.Checkpoint, filepath.Base(newestOf(t, c.Checkpoint).Folder))
	for name, want := range beside {
		text, err := os.ReadFile(filepath.Join(saved, name))
		require.NoError(t, err)
		var got map[string]any
		require.NoError(t, json.Unmarshal(text, &got))
		if name == "config.json" {
			require.Equal(t, []any{124.0, 126.0}, got["eos_token_id"])
			require.EqualValues(t, 1, got["bos_token_id"])
			continue
		}
		require.Equal(t, fmt.Sprint(want), fmt.Sprint(got), name)
	}
	// The tokenizer of the checkpoint has the same end tokens.
	m, err := planner.OpenModel(context.Background(), saved, "")
	require.NoError(t, err)
	defer m.Close()
	tok, err := m.OpenTokenizer(filepath.Join(m.Path, planner.TokenizerFile))
	require.NoError(t, err)
	require.Equal(t, []int32{126, 124}, token.SpecialsOf(tok).Ends)

	require.NoError(t, os.WriteFile(c.Data, []byte(strings.Repeat("an end is here~ ", 20)), 0o644))
	c.Checkpoint = scratch(t)
	require.NotContains(t, strings.Join(ended(t, c), "\n"), "never occurs")
}
