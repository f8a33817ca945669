package model

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestUnsupportedKeysAreRefused checks that unsupported config keys that would change results are
// rejected, and that the error names the key. The same keys are accepted with values that change
// nothing.
func TestUnsupportedKeysAreRefused(t *testing.T) {
	for key, value := range map[string]string{
		"num_experts": "8", "num_local_experts": "4", "num_experts_per_tok": "2", "quantization_config": `{"bits": 4}`, "attn_logit_softcapping": "50.0",
		"final_logit_softcapping": "30.0", "logit_scale": "0.0625", "residual_multiplier": "0.22", "query_pre_attn_scalar": "256", "partial_rotary_factor": "0.5",
		"rotary_dim": "64", "rope_interleaved": "true", "no_rope_layers": "[1,0]", "alibi": "true", "attention_chunk_size": "8192", "clip_qkv": "8.0",
		"kv_lora_rank": "512", "use_qk_norm": "true", "num_nextn_predict_layers": "1", "vision_config": `{"depth": 1}`, "text_config": `{"x": 1}`,
		"layer_types": `["full_attention", "sliding_attention"]`,
	} {
		for _, base := range []string{gpt2JSON, llamaJSON} {
			_, err := Parse(with(t, base, key, value))
			require.ErrorContains(t, err, key, "%s %s", key, value)
			require.NotContains(t, err.Error(), "\n")
		}
	}
	for key, value := range map[string]string{
		"num_experts": "0", "num_local_experts": "1", "quantization_config": "null", "attn_logit_softcapping": "null", "logit_scale": "1.0", "partial_rotary_factor": "1.0",
		"rope_interleaved": "false", "alibi": "false", "no_rope_layers": "[]", "use_qk_norm": "false", "layer_types": `["full_attention", "full_attention"]`,
		"use_cache": "true", "pretraining_tp": "1", "torch_dtype": `"bfloat16"`, "max_window_layers": "28", "bos_token_id": "1",
	} {
		_, err := Parse(with(t, llamaJSON, key, value))
		require.NoError(t, err, "%s %s", key, value)
	}
	_, err := Parse(with(t, llamaJSON, "layer_types", `"full"`))
	require.ErrorContains(t, err, "layer_types")
	_, err = Parse(with(t, llamaJSON, "model_type", `"smollm3"`))
	require.ErrorContains(t, err, `model_type "smollm3" is not supported`)
}

func TestRelativesOfLlama(t *testing.T) {
	qwen3, err := Parse(with(t, llamaJSON, "model_type", `"qwen3"`, "num_key_value_heads", "2"))
	require.NoError(t, err)
	require.True(t, qwen3.NormHeads)
	require.Equal(t, 128, qwen3.HeadDim, "Qwen3Config's default")
	require.False(t, qwen3.QKVBias)
	_, err = Parse(with(t, llamaJSON, "model_type", `"qwen3"`, "num_key_value_heads", "2", "use_sliding_window", "true"))
	require.ErrorContains(t, err, "use_sliding_window")
	_, err = Parse(with(t, llamaJSON, "model_type", `"qwen3"`))
	require.ErrorContains(t, err, "num_key_value_heads is 32", "Qwen3Config's default")

	olmo2, err := Parse(with(t, llamaJSON, "model_type", `"olmo2"`))
	require.NoError(t, err)
	require.True(t, olmo2.NormQK)
	require.True(t, olmo2.PostNorm)
	require.Equal(t, 1e-5, olmo2.NormEps)

	for name, c := range map[string]Config{"qwen3": qwen3, "olmo2": olmo2} {
		text, err := Marshal(c, "float32", nil)
		require.NoError(t, err)
		back, err := Parse(text)
		require.NoError(t, err)
		require.Contains(t, string(text), `"model_type": "`+name+`"`)
		require.True(t, back.SameModel(c))
	}
}

// TestDropoutKeysAreNoted checks that dropout keys only fill Config.Dropouts, a text for the user;
// the model stays the same.
func TestDropoutKeysAreNoted(t *testing.T) {
	plain, err := Parse([]byte(gpt2JSON))
	require.NoError(t, err)
	c, err := Parse(with(t, gpt2JSON, "attn_pdrop", "0.1", "resid_pdrop", "0.1", "embd_pdrop", "0.0", "summary_first_dropout", "0.1"))
	require.NoError(t, err)
	require.Equal(t, "attn_pdrop 0.1, resid_pdrop 0.1", c.Dropouts)
	require.True(t, c.SameModel(plain))
}
