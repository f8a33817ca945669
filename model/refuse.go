package model

import (
	"encoding/json"
	"fmt"
	"sort"
	"strings"
)

// unsupported lists keys that change a model's result and are not supported, with the values
// (as JSON) that change nothing. An absent or null key is accepted.
var unsupported = []struct {
	keys    []string
	neutral []string
	why     string
}{
	{[]string{"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_shared_experts"}, []string{"0", "1"}, "mixtures of experts are not built"},
	{[]string{"num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "decoder_sparse_step"}, nil, "mixtures of experts are not built"},
	{[]string{"quantization_config", "compression_config", "quantization"}, nil, "quantised weights are not read"},
	{[]string{"attn_logit_softcapping", "final_logit_softcapping", "attn_logit_softcap", "final_logit_softcap", "logits_soft_cap"}, []string{"0", "0.0"}, "soft caps of logits are not built"},
	{[]string{"logit_scale", "logits_scaling", "lm_head_multiplier", "residual_multiplier", "embedding_multiplier", "attention_multiplier"}, []string{"1", "1.0"}, "multipliers of values are not built"},
	{[]string{"query_pre_attn_scalar", "scale_depth", "scale_emb", "dim_model_base"}, nil, "another scale of attention or of the residual stream is not built"},
	{[]string{"partial_rotary_factor", "rotary_pct"}, []string{"1", "1.0"}, "rotary positions of a part of a head are not built"},
	{[]string{"rotary_dim", "rope_interleaved", "rope_ratio", "rope_local_base_freq", "mrope_section"}, []string{"false"}, "this variant of rotary positions is not built"},
	{[]string{"no_rope_layers", "no_rope_layer_interval"}, nil, "layers without rotary positions are not built"},
	{[]string{"alibi", "use_alibi", "multi_query", "parallel_attn", "use_parallel_residual", "new_decoder_architecture"}, []string{"false"}, "this architecture is not built"},
	{[]string{"attention_chunk_size", "sliding_window_pattern", "global_attn_every_n_layers", "attention_window"}, nil, "attention to a part of the tokens before is not built"},
	{[]string{"clip_qkv", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"}, nil, "this form of attention is not built"},
	{[]string{"use_qk_norm", "qk_norm", "qk_layernorm"}, []string{"false"}, "norms of queries and keys are built for qwen3 and olmo2 alone, which have them always"},
	{[]string{"attention_sinks", "num_sink_tokens"}, []string{"false", "0"}, "attention sinks are not built"},
	{[]string{"num_nextn_predict_layers"}, []string{"0"}, "prediction of several tokens is not built"},
	{[]string{"cross_attention_layers", "vision_config", "audio_config"}, nil, "models of more than text are not built"},
	{[]string{"text_config"}, nil, "a model of text within another is not read; give the config.json of the text model"},
}

// refuse reports the first unsupported key that changes the result.
func (o *object) refuse() {
	for _, u := range unsupported {
		for _, key := range u.keys {
			if o.read[key] { // the architecture supports it
				continue
			}
			v := o.raw(key)
			if v == nil {
				continue
			}
			fine := string(v) == "{}" || string(v) == "[]"
			for _, n := range u.neutral {
				fine = fine || string(v) == n
			}
			if !fine {
				o.failf("%s is %s: %s", key, shorten(v), u.why)
				return
			}
		}
	}
	if !o.read["layer_types"] {
		o.fullAttention()
	}
}

// fullAttention refuses layer_types that are not all full attention.
func (o *object) fullAttention() {
	v := o.raw("layer_types")
	if v == nil {
		return
	}
	var types []string
	if err := json.Unmarshal(v, &types); err != nil {
		o.failf("layer_types is %s; it must be a list of strings", shorten(v))
		return
	}
	for i, t := range types {
		if t != "full_attention" {
			o.failf("layer_types has %q for layer %d: only full_attention is built", cutText(t), i)
			return
		}
	}
}

func cutText(s string) string { return shorten([]byte(s)) }

// dropoutKeys are the dropout keys in the configurations of all families.
var dropoutKeys = []string{"attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout", "dropout"}

// dropouts lists the dropout keys that are not 0: Spillway does not apply them.
func (o *object) dropouts() string {
	var list []string
	for _, key := range dropoutKeys {
		var p float64
		if v := o.raw(key); v != nil && json.Unmarshal(v, &p) == nil && p != 0 {
			list = append(list, fmt.Sprintf("%s %g", key, p))
		}
	}
	sort.Strings(list)
	return strings.Join(list, ", ")
}
