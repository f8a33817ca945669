package model

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

const gpt2JSON = `{"model_type":"gpt2","n_layer":2,"n_head":2,"n_embd":8,"vocab_size":16,"n_positions":32,"unknown":[1,{"x":null}]}`

const llamaJSON = `{"model_type":"llama","hidden_size":64,"intermediate_size":96,"num_hidden_layers":2,"num_attention_heads":8,"vocab_size":100,"max_position_embeddings":128}`

func TestGPT2Defaults(t *testing.T) {
	c, err := Parse([]byte(gpt2JSON))
	require.NoError(t, err)
	require.Equal(t, Config{
		Family: GPT2, Layers: 2, Width: 8, FFN: 32, Heads: 2, KVHeads: 2, HeadDim: 4, Vocab: 16, Positions: 32,
		Act: graph.ActGELUTanh, NormEps: 1e-5, TiedHead: true, InitStd: 0.02,
	}, c)
}

func TestLlamaDefaults(t *testing.T) {
	c, err := Parse([]byte(llamaJSON))
	require.NoError(t, err)
	require.Equal(t, Config{
		Family: Llama, Layers: 2, Width: 64, FFN: 96, Heads: 8, KVHeads: 8, HeadDim: 8, Vocab: 100, Positions: 128,
		NormEps: 1e-6, InitStd: 0.02, RopeTheta: 10000,
	}, c)
}

// with returns base with keys set to JSON values; "" deletes a key.
func with(t *testing.T, base string, keys ...string) []byte {
	var m map[string]json.RawMessage
	require.NoError(t, json.Unmarshal([]byte(base), &m))
	for i := 0; i < len(keys); i += 2 {
		if keys[i+1] == "" {
			delete(m, keys[i])
		} else {
			m[keys[i]] = json.RawMessage(keys[i+1])
		}
	}
	out, err := json.Marshal(m)
	require.NoError(t, err)
	return out
}

func TestValues(t *testing.T) {
	llama3 := `{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":8192}`
	scaling := &RopeScaling{Factor: 8, LowFreq: 1, HighFreq: 4, OriginalPositions: 8192}
	for _, tc := range []struct {
		base  string
		keys  []string
		check func(Config) any
		want  any
	}{
		{gpt2JSON, []string{"n_inner", "null"}, func(c Config) any { return c.FFN }, 32},
		{gpt2JSON, []string{"n_inner", "24"}, func(c Config) any { return c.FFN }, 24},
		{gpt2JSON, []string{"activation_function", `"gelu"`}, func(c Config) any { return c.Act }, graph.ActGELU},
		{gpt2JSON, []string{"activation_function", `"gelu_pytorch_tanh"`}, func(c Config) any { return c.Act }, graph.ActGELUTanh},
		{gpt2JSON, []string{"tie_word_embeddings", "false"}, func(c Config) any { return c.TiedHead }, false},
		{gpt2JSON, []string{"layer_norm_epsilon", "1E-6"}, func(c Config) any { return c.NormEps }, 1e-6},
		{llamaJSON, []string{"num_key_value_heads", "2"}, func(c Config) any { return c.KVHeads }, 2},
		{llamaJSON, []string{"num_key_value_heads", "null"}, func(c Config) any { return c.KVHeads }, 8},
		{llamaJSON, []string{"head_dim", "16"}, func(c Config) any { return c.HeadDim }, 16},
		{llamaJSON, []string{"head_dim", "16", "hidden_size", "60"}, func(c Config) any { return c.Width }, 60},
		{llamaJSON, []string{"tie_word_embeddings", "true"}, func(c Config) any { return c.TiedHead }, true},
		{llamaJSON, []string{"rope_theta", "500000"}, func(c Config) any { return c.RopeTheta }, 500000.0},
		{llamaJSON, []string{"rope_scaling", llama3}, func(c Config) any { return c.RopeScaling }, scaling},
		{llamaJSON, []string{"rope_scaling", `{"type":"default"}`}, func(c Config) any { return c.RopeScaling }, (*RopeScaling)(nil)},
		{llamaJSON, []string{"rope_parameters", strings.Replace(llama3, "{", `{"rope_theta":5e5,`, 1)}, func(c Config) any { return []any{c.RopeTheta, c.RopeScaling} }, []any{5e5, scaling}},
		{llamaJSON, []string{"attention_bias", "true"}, func(c Config) any { return []bool{c.QKVBias, c.OutBias, c.MLPBias} }, []bool{true, true, false}},
		{llamaJSON, []string{"mlp_bias", "true"}, func(c Config) any { return []bool{c.QKVBias, c.OutBias, c.MLPBias} }, []bool{false, false, true}},
		{llamaJSON, []string{"model_type", `"qwen2"`, "num_key_value_heads", "2"}, func(c Config) any { return []bool{c.QKVBias, c.OutBias} }, []bool{true, false}},
		{llamaJSON, []string{"model_type", `"mistral"`}, func(c Config) any { return c.KVHeads }, 8}, // the default of MistralConfig
		{llamaJSON, []string{"model_type", `"mistral"`, "sliding_window", "null"}, func(c Config) any { return c.Family }, Llama},
	} {
		c, err := Parse(with(t, tc.base, tc.keys...))
		require.NoError(t, err, tc.keys)
		require.Equal(t, tc.want, tc.check(c), tc.keys)
	}
}

func TestErrorsNameTheKey(t *testing.T) {
	for _, tc := range []struct {
		base string
		keys []string
		want []string // parts of the error
	}{
		{gpt2JSON, []string{"model_type", ""}, []string{"model_type", "missing"}},
		{gpt2JSON, []string{"model_type", "", "Model_Type", `"gpt2"`}, []string{"model_type", "Model_Type"}},
		{gpt2JSON, []string{"model_type", `"bert"`}, []string{"model_type", "bert", "gpt2"}},
		{gpt2JSON, []string{"model_type", "7"}, []string{"model_type", "string"}},
		{gpt2JSON, []string{"n_layer", ""}, []string{"n_layer", "missing"}},
		{gpt2JSON, []string{"n_head", ""}, []string{"n_head", "missing"}},
		{gpt2JSON, []string{"n_embd", ""}, []string{"n_embd", "missing"}},
		{gpt2JSON, []string{"vocab_size", ""}, []string{"vocab_size", "missing"}},
		{gpt2JSON, []string{"n_positions", ""}, []string{"n_positions", "missing"}},
		{gpt2JSON, []string{"n_positions", "null"}, []string{"n_positions", "null"}},
		{gpt2JSON, []string{"n_layer", "-1"}, []string{"n_layer", "-1", "from 1"}},
		{gpt2JSON, []string{"n_layer", "0"}, []string{"n_layer", "from 1"}},
		{gpt2JSON, []string{"n_layer", "1e12"}, []string{"n_layer", "1e12"}},
		{gpt2JSON, []string{"n_layer", "1000000000000"}, []string{"n_layer", "to 10000"}},
		{gpt2JSON, []string{"n_layer", "99999999999999999999999"}, []string{"n_layer"}},
		{gpt2JSON, []string{"n_layer", "2.5"}, []string{"n_layer", "2.5", "integer"}},
		{gpt2JSON, []string{"n_layer", `"2"`}, []string{"n_layer", "integer"}},
		{gpt2JSON, []string{"n_layer", `[2]`}, []string{"n_layer", "integer"}},
		{gpt2JSON, []string{"n_head", "3"}, []string{"n_head", "3", "n_embd 8"}},
		{gpt2JSON, []string{"n_inner", "0"}, []string{"n_inner"}},
		{gpt2JSON, []string{"activation_function", `"tanh"`}, []string{"activation_function", "tanh", "gelu_new"}},
		{gpt2JSON, []string{"layer_norm_epsilon", "-1e-5"}, []string{"layer_norm_epsilon"}},
		{gpt2JSON, []string{"layer_norm_epsilon", "1e999"}, []string{"layer_norm_epsilon"}},
		{gpt2JSON, []string{"tie_word_embeddings", `"yes"`}, []string{"tie_word_embeddings", "true or false"}},
		{gpt2JSON, []string{"scale_attn_weights", "false"}, []string{"scale_attn_weights"}},
		{gpt2JSON, []string{"scale_attn_by_inverse_layer_idx", "true"}, []string{"scale_attn_by_inverse_layer_idx"}},
		{gpt2JSON, []string{"add_cross_attention", "true"}, []string{"add_cross_attention"}},
		{llamaJSON, []string{"hidden_size", ""}, []string{"hidden_size", "missing"}},
		{llamaJSON, []string{"intermediate_size", ""}, []string{"intermediate_size", "missing"}},
		{llamaJSON, []string{"num_hidden_layers", ""}, []string{"num_hidden_layers", "missing"}},
		{llamaJSON, []string{"num_attention_heads", ""}, []string{"num_attention_heads", "missing"}},
		{llamaJSON, []string{"vocab_size", ""}, []string{"vocab_size", "missing"}},
		{llamaJSON, []string{"max_position_embeddings", ""}, []string{"max_position_embeddings", "missing"}},
		{llamaJSON, []string{"num_attention_heads", "7"}, []string{"num_attention_heads", "hidden_size 64"}},
		{llamaJSON, []string{"num_key_value_heads", "3"}, []string{"num_key_value_heads", "num_attention_heads 8"}},
		{llamaJSON, []string{"num_key_value_heads", "16"}, []string{"num_key_value_heads"}},
		{llamaJSON, []string{"head_dim", "7"}, []string{"head_dim", "even"}},
		{llamaJSON, []string{"hidden_act", `"gelu"`}, []string{"hidden_act", "gelu", "silu"}},
		{llamaJSON, []string{"rope_theta", "0"}, []string{"rope_theta"}},
		{llamaJSON, []string{"rope_scaling", `{"type":"yarn","factor":4}`}, []string{"rope_scaling", "yarn", "llama3"}},
		{llamaJSON, []string{"rope_scaling", `{"rope_type":"llama3","factor":8}`}, []string{"rope_scaling", "low_freq_factor", "missing"}},
		{llamaJSON, []string{"rope_scaling", `{"rope_type":"llama3","factor":8,"low_freq_factor":4,"high_freq_factor":1,"original_max_position_embeddings":10}`}, []string{"high_freq_factor"}},
		{llamaJSON, []string{"rope_scaling", "8"}, []string{"rope_scaling", "object"}},
		{llamaJSON, []string{"rope_theta", "5", "rope_parameters", `{"rope_theta":6}`}, []string{"rope_theta", "agree"}},
		{llamaJSON, []string{"model_type", `"qwen2"`}, []string{"num_key_value_heads", "32"}}, // the default of Qwen2Config
		{llamaJSON, []string{"model_type", `"qwen2"`, "num_key_value_heads", "2", "use_sliding_window", "true"}, []string{"use_sliding_window"}},
		{llamaJSON, []string{"model_type", `"mistral"`, "max_position_embeddings", "8192"}, []string{"sliding_window", "4096"}},
	} {
		_, err := Parse(with(t, tc.base, tc.keys...))
		require.Error(t, err, tc.keys)
		for _, part := range tc.want {
			require.ErrorContains(t, err, part, tc.keys)
		}
		require.NotContains(t, err.Error(), "\n")
	}
	for text, want := range map[string]string{"": "ends early", "{": "ends early", "null": "null", "[]": "object", `{"a":1} x`: "follows", "{a}": "byte 2"} {
		_, err := Parse([]byte(text))
		require.ErrorContains(t, err, want, text)
	}
}

func TestMarshalThenRead(t *testing.T) {
	c, err := Parse(with(t, llamaJSON, "model_type", `"qwen2"`, "num_key_value_heads", "2", "tie_word_embeddings", "true"))
	require.NoError(t, err)
	text, err := Marshal(c, "float32", nil)
	require.NoError(t, err)
	back, err := Parse(text)
	require.NoError(t, err)
	require.Equal(t, c, back)

	c.OutBias, c.QKVBias = true, false
	_, err = Marshal(c, "float32", nil)
	require.ErrorContains(t, err, "OutBias true")
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(gpt2JSON))
	f.Add([]byte(llamaJSON))
	f.Add([]byte(strings.Replace(llamaJSON, `"llama"`, `"qwen2","num_key_value_heads":2`, 1)))
	f.Add([]byte(strings.Replace(llamaJSON, `{`, `{"rope_scaling":{"rope_type":"llama3","factor":8,"low_freq_factor":1,"high_freq_factor":4,"original_max_position_embeddings":64},`, 1)))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse(data)
		if err != nil {
			return
		}
		require.Positive(t, c.Layers)
		require.Zero(t, c.Heads%c.KVHeads)
		out, err := Marshal(c, "float32", nil)
		require.NoError(t, err)
		back, err := Parse(out)
		require.NoError(t, err)
		require.True(t, back.SameModel(c))
	})
}
