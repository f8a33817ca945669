package token

import (
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// toyTokenizer returns a tokenizer.json of the 256 bytes, with special tokens from id 256 on.
func toyTokenizer(t testing.TB, special ...string) map[string]any {
	m := tokenizerJSON(t, GPT2().(*bpeTokenizer).model, 256, byteLevel, false, special[0])
	var added []any
	for i, content := range special {
		added = append(added, map[string]any{"id": 256 + i, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
	}
	m["added_tokens"] = added
	return m
}

// modelFolder writes files of JSON and returns the path of the tokenizer.json among them.
func modelFolder(t testing.TB, files map[string]any) string {
	dir := t.TempDir()
	for name, v := range files {
		text, isText := v.(string)
		if !isText {
			text = string(marshal(t, v))
		}
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	return filepath.Join(dir, tokenizerFile)
}

type object = map[string]any

// TestSpecialsOfFamilies checks the published files of each model family, with the ids of a small
// tokenizer. Token 256 is the first of the list tokens, 257 the second.
func TestSpecialsOfFamilies(t *testing.T) {
	for _, c := range []struct {
		family                         string
		tokens                         []string
		tokenizer, generation, modelOf object
		bos, pad                       int32
		ends, prompt                   []int32 // prompt: before the text
	}{
		{"Llama 2", []string{"<unk>", "<s>", "</s>"},
			object{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true, "add_eos_token": false,
				"bos_token": object{"content": "<s>", "lstrip": false}, "eos_token": object{"content": "</s>"}, "pad_token": nil, "unk_token": object{"content": "<unk>"}},
			object{"bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 256}, object{"bos_token_id": 257, "eos_token_id": 258},
			257, 256, []int32{258}, []int32{257}},
		{"Llama 3 base", []string{"<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"},
			object{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
			object{"bos_token_id": 256, "eos_token_id": 257}, object{"bos_token_id": 256, "eos_token_id": 257},
			256, -1, []int32{257}, nil},
		{"Llama 3 instruct", []string{"<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"},
			object{"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
			object{"bos_token_id": 256, "eos_token_id": []int{257, 258, 259}}, object{"bos_token_id": 256, "eos_token_id": []int{257, 258, 259}},
			256, -1, []int32{259, 257, 258}, nil},
		{"Mistral", []string{"<unk>", "<s>", "</s>", "[INST]", "[/INST]"},
			object{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true, "bos_token": "<s>", "eos_token": "</s>"},
			object{"bos_token_id": 257, "eos_token_id": 258}, object{"bos_token_id": 257, "eos_token_id": 258},
			257, -1, []int32{258}, []int32{257}},
		{"Qwen 2 instruct", []string{"<|endoftext|>", "<|im_start|>", "<|im_end|>"},
			object{"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": false, "bos_token": nil, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
			object{"bos_token_id": 256, "pad_token_id": 256, "eos_token_id": []int{258, 256}}, object{"bos_token_id": 256, "eos_token_id": 258},
			256, 256, []int32{258, 256}, nil},
		{"Qwen 3", []string{"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"},
			object{"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
			object{"bos_token_id": 256, "pad_token_id": 256, "eos_token_id": []int{258, 256}}, object{"bos_token_id": 256, "eos_token_id": 258},
			256, 256, []int32{258, 256}, nil},
		{"OLMo 2", []string{"<|pad|>", "<|endoftext|>"},
			object{"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"},
			object{"eos_token_id": 257, "pad_token_id": 256}, object{"eos_token_id": 257, "pad_token_id": 256},
			257, 256, []int32{257}, nil},
		{"SmolLM 2 instruct", []string{"<|endoftext|>", "<|im_start|>", "<|im_end|>"},
			object{"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
			object{"bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 258}, object{"bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 258},
			257, 258, []int32{258}, nil},
		{"Gemma 2 instruct", []string{"<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"},
			object{"tokenizer_class": "GemmaTokenizer", "add_bos_token": true, "bos_token": object{"content": "<bos>"}, "eos_token": object{"content": "<eos>"}, "pad_token": object{"content": "<pad>"}},
			object{"bos_token_id": 258, "eos_token_id": []int{257, 260}, "pad_token_id": 256}, object{"bos_token_id": 258, "eos_token_id": []int{257, 260}, "pad_token_id": 256},
			258, 256, []int32{257, 260}, []int32{258}},
		{"Phi 3", []string{"<s>", "<|endoftext|>", "<|assistant|>", "<|end|>"},
			object{"tokenizer_class": "LlamaTokenizer", "add_bos_token": false, "bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
			object{"bos_token_id": 256, "eos_token_id": []int{257, 258, 259}, "pad_token_id": 257}, object{"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257},
			256, 257, []int32{257, 258, 259}, nil},
	} {
		t.Run(c.family, func(t *testing.T) {
			tok, err := Open(modelFolder(t, map[string]any{tokenizerFile: toyTokenizer(t, c.tokens...), tokenizerConfig: c.tokenizer, generationConfig: c.generation, modelConfig: c.modelOf}))
			require.NoError(t, err)
			s := SpecialsOf(tok)
			require.Empty(t, s.Notes)
			require.Equal(t, c.bos, s.BOS)
			require.Equal(t, c.pad, s.Pad)
			require.Equal(t, c.ends, s.Ends)
			require.Equal(t, c.ends[0], tok.EOT())
			require.Equal(t, append(c.prompt, 64), Prompt(tok, "a"))
			for key, id := range c.modelOf {
				require.JSONEq(t, string(marshal(t, id)), string(s.IDs[key]), "config.json keeps what it had")
				require.Equal(t, s.IDs[key], s.ModelIDs()[key])
			}
		})
	}
}

// TestEndTokenFromEachFile checks that each file can define the end token. Without any, the token
// names of known models are used.
func TestEndTokenFromEachFile(t *testing.T) {
	toy := toyTokenizer(t, "<|endoftext|>", "<|end|>")
	for name, c := range map[string]struct {
		files map[string]any
		ends  []int32
	}{
		"no other file":           {nil, []int32{256}},
		tokenizerConfig:           {map[string]any{tokenizerConfig: object{"eos_token": "<|end|>"}}, []int32{257}},
		specialTokensMap:          {map[string]any{specialTokensMap: object{"eos_token": object{"content": "<|end|>"}}}, []int32{257}},
		generationConfig:          {map[string]any{generationConfig: object{"eos_token_id": 257}}, []int32{257}},
		modelConfig:               {map[string]any{modelConfig: object{"eos_token_id": []int{257}}}, []int32{257}},
		"null and negative":       {map[string]any{tokenizerConfig: object{"eos_token": nil}, modelConfig: object{"eos_token_id": -1}}, []int32{256}},
		"a list, tokenizer first": {map[string]any{tokenizerConfig: object{"eos_token": "<|end|>"}, generationConfig: object{"eos_token_id": []int{256, 257}}}, []int32{257, 256}},
	} {
		files := map[string]any{tokenizerFile: toy}
		for name, v := range c.files {
			files[name] = v
		}
		tok, err := Open(modelFolder(t, files))
		require.NoError(t, err)
		require.Equal(t, c.ends, SpecialsOf(tok).Ends, name)
		require.Empty(t, SpecialsOf(tok).Notes, name)
	}
}

// TestSpecialsConflicts checks that a contradiction between files gives a note that names the one
// used.
func TestSpecialsConflicts(t *testing.T) {
	toy := toyTokenizer(t, "<|endoftext|>", "<|end|>", "<pad>")
	for want, c := range map[string]struct {
		files map[string]any
		ends  []int32
	}{
		`eos_token is "<|end|>" (token 257), but the model's eos_token_id is [256]; generation stops at each`: {
			map[string]any{tokenizerConfig: object{"eos_token": "<|end|>"}, generationConfig: object{"eos_token_id": 256}}, []int32{257, 256}},
		`config.json names token 256 as eos_token_id, but generation_config.json names [257], which is used`: {
			map[string]any{generationConfig: object{"eos_token_id": 257}, modelConfig: object{"eos_token_id": 256}}, []int32{257}},
		`config.json names token 50256 as eos_token_id, but tokenizer.json has 259 tokens; it is ignored`: {
			map[string]any{modelConfig: object{"eos_token_id": 50256}}, []int32{256}},
		`config.json names token 2 as eos_token_id, but that is "#", which is not a special token; it is ignored`: {
			map[string]any{modelConfig: object{"eos_token_id": 2}}, []int32{256}},
		`eos_token is "<|end|>" in tokenizer_config.json and "<|endoftext|>" in special_tokens_map.json; the first is used`: {
			map[string]any{tokenizerConfig: object{"eos_token": "<|end|>"}, specialTokensMap: object{"eos_token": "<|endoftext|>"}}, []int32{257}},
		`eos_token "<none>" is no token of tokenizer.json; it is ignored`: {
			map[string]any{tokenizerConfig: object{"eos_token": "<none>"}}, []int32{256}},
		`pad_token is "<pad>" (token 258), but the model's pad_token_id is [256]; pad_token is used`: {
			map[string]any{tokenizerConfig: object{"pad_token": "<pad>"}, modelConfig: object{"pad_token_id": 256}}, []int32{256}},
		`tokenizer_config.json calls token 257 "<other>", but tokenizer.json calls it "<|end|>", which is used`: {
			map[string]any{tokenizerConfig: object{"added_tokens_decoder": object{"257": object{"content": "<other>"}}}}, []int32{256}},
	} {
		files := map[string]any{tokenizerFile: toy}
		for name, v := range c.files {
			files[name] = v
		}
		tok, err := Open(modelFolder(t, files))
		require.NoError(t, err)
		require.Equal(t, []string{want}, SpecialsOf(tok).Notes)
		require.Equal(t, c.ends, SpecialsOf(tok).Ends, want)
	}
	for want, files := range map[string]map[string]any{
		"tokenizer_config.json beside it is not a JSON object":     {tokenizerConfig: "[]"},
		"eos_token_id must be a token id or a list":                {modelConfig: object{"eos_token_id": "x"}},
		"chat_template must be text, or a list":                    {tokenizerConfig: object{"chat_template": 3}},
		`added_tokens_decoder has "x"; it must be an id`:           {tokenizerConfig: object{"added_tokens_decoder": object{"x": object{"content": "a"}}}},
		"added_tokens_decoder must be an object of tokens by id":   {tokenizerConfig: object{"added_tokens_decoder": []int{1}}},
		`added token "x" has id 99999999; it must be 0 to 4194303`: {tokenizerConfig: object{"added_tokens_decoder": object{"99999999": object{"content": "x"}}}},
	} {
		files[tokenizerFile] = toy
		_, err := Open(modelFolder(t, files))
		require.ErrorContains(t, err, want)
	}
}

// TestAddedTokensDecoder checks that added_tokens_decoder adds tokens missing in tokenizer.json. A
// file that changes tokens must change the tokenizer's name.
func TestAddedTokensDecoder(t *testing.T) {
	toy := toyTokenizer(t, "<|endoftext|>")
	plain, err := Open(modelFolder(t, map[string]any{tokenizerFile: toy, tokenizerConfig: object{"eos_token": "<|endoftext|>"}}))
	require.NoError(t, err)
	require.Equal(t, load(t, toy).Name(), plain.Name())
	tok, err := Open(modelFolder(t, map[string]any{tokenizerFile: toy, tokenizerConfig: object{"eos_token": "<|im_end|>",
		"added_tokens_decoder": object{"256": object{"content": "<|endoftext|>", "special": true}, "257": object{"content": "<|im_end|>", "special": true}}}}))
	require.NoError(t, err)
	require.Equal(t, []int32{64, 257}, tok.Encode("a<|im_end|>"))
	require.Equal(t, int32(257), tok.EOT())
	require.NotEqual(t, plain.Name(), tok.Name())
}

// TestChatTemplateOfFiles checks that the default of several templates is used, and that
// chat_template.jinja has priority.
func TestChatTemplateOfFiles(t *testing.T) {
	list := object{"chat_template": []object{{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}}}
	for want, files := range map[string]map[string]any{
		"D": {tokenizerConfig: list},
		"J": {tokenizerConfig: list, chatTemplateFile: "J"},
		"S": {tokenizerConfig: object{"chat_template": "S"}},
		"":  {tokenizerConfig: object{"chat_template": nil}},
	} {
		files[tokenizerFile] = toyTokenizer(t, "</s>")
		tok, err := Open(modelFolder(t, files))
		require.NoError(t, err)
		require.Equal(t, want, SpecialsOf(tok).Template)
	}
}

// FuzzSpecials checks that no content of the other tokenizer files gives invalid token ids or a
// panic.
func FuzzSpecials(f *testing.F) {
	text := marshal(f, toyTokenizer(f, "<|endoftext|>", "<|end|>"))
	f.Add([]byte(`{"eos_token": {"content": "<|end|>"}, "add_bos_token": true, "tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": {"258": {"content": "<x>"}}, "chat_template": [{"name": "default", "template": "x"}]}`),
		[]byte(`{"eos_token_id": [256, 257], "pad_token_id": -1, "bos_token_id": 3}`))
	f.Fuzz(func(t *testing.T, config, ids []byte) {
		tok, err := Parse("t", text, func(name string) ([]byte, error) {
			switch name {
			case tokenizerConfig, specialTokensMap:
				return config, nil
			case generationConfig, modelConfig:
				return ids, nil
			}
			return nil, fs.ErrNotExist
		})
		if err != nil {
			return
		}
		s := SpecialsOf(tok)
		for _, id := range append([]int32{s.BOS, s.Pad, tok.EOT()}, s.Ends...) {
			require.GreaterOrEqual(t, id, int32(-1))
			require.Less(t, int(id), tok.VocabSize())
		}
		_, err = json.Marshal(s.ModelIDs())
		require.NoError(t, err)
	})
}
