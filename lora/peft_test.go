package lora

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPEFTConfig(t *testing.T) {
	p := &PEFT{Options: Options{Rank: 4, Alpha: 8, Dropout: 0.1}, Base: "/models/base", Hash: "ab"}
	text, err := p.Marshal([]string{"transformer.h.0.attn.c_attn"}, true)
	require.NoError(t, err)
	for _, want := range []string{`"peft_type": "LORA"`, `"task_type": "CAUSAL_LM"`, `"r": 4`, `"lora_alpha": 8`, `"fan_in_fan_out": true`, `"bias": "none"`,
		`"base_model_name_or_path": "/models/base"`, `"target_modules": [`, `"rank_pattern": {}`} {
		require.Contains(t, string(text), want)
	}
	var tensors []string
	for _, i := range []int{0, 1, 2, 4} {
		for _, suffix := range []string{SuffixA, SuffixB} {
			tensors = append(tensors, TensorName(fmt.Sprintf("h.%d.attn.c_attn%s", i, suffix), "transformer."))
		}
	}
	require.Equal(t, "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight", tensors[0])
	require.Equal(t, "h.0.attn.c_attn.lora_A.weight", ParamName(tensors[0]))
	got, err := ParsePEFT(text, tensors)
	require.NoError(t, err)
	p.Targets = []string{"h.{0-2}.attn.c_attn.weight", "h.{4-4}.attn.c_attn.weight"}
	require.Equal(t, p, got)

	for change, said := range map[string]string{
		`"use_dora": true`:               "use_dora is true, which is not built",
		`"use_rslora": true`:             "use_rslora is true",
		`"bias": "all"`:                  `bias is "all"`,
		`"modules_to_save": ["lm_head"]`: "modules_to_save is [lm_head]",
		`"rank_pattern": {"q": 2}`:       "rank_pattern is map[q:2]",
		`"alpha_pattern": {"q": 2}`:      "alpha_pattern",
		`"peft_type": "IA3"`:             `peft_type is "IA3"`,
		`"lora_bias": true`:              "lora_bias is true",
		`"layer_replication": [[0, 2]]`:  "layer_replication",
		`"r": "x"`:                       "adapter_config.json: json",
	} {
		_, err := ParsePEFT([]byte(`{"peft_type": "LORA", "r": 4, "lora_alpha": 8, `+change+`}`), tensors)
		require.ErrorContains(t, err, said)
	}
	_, err = ParsePEFT(text, []string{"base_model.model.lm_head.weight"})
	require.ErrorContains(t, err, "is no part of a LoRA adapter")
}

func TestProduct(t *testing.T) {
	o := Options{Rank: 2, Alpha: 1}  // alpha/rank is 1/2
	a := []float32{1, 2, 3, 4, 5, 6} // shape (2,3)
	b := []float32{1, 0, 0, 2}       // shape (2,2)
	want := []float32{0.5, 1, 1.5, 4, 5, 6}
	for at := range want {
		for n := range len(want) - at + 1 {
			p, err := NewProduct(o, a, b, false)
			require.NoError(t, err)
			w := make([]float32, n)
			p.AddTo(w, int64(at))
			require.Equal(t, want[at:at+n], w)
		}
	}
	p, err := NewProduct(o, a, b, true)
	require.NoError(t, err)
	w := []float32{1, 1, 1, 1, 1, 1} // shape (3,2)
	p.AddTo(w, 0)
	require.Equal(t, []float32{1.5, 5, 2, 6, 2.5, 7}, w)
	_, err = NewProduct(o, a[:5], b, false)
	require.Error(t, err)
}

// TestBaseHash checks that the hash is independent of the parameters' order and of the pieces they
// are added in.
func TestBaseHash(t *testing.T) {
	var one, two, other BaseHash
	one.Add("b", []float32{1, 2, 3})
	one.Add("a", []float32{4})
	two.Add("a", []float32{4})
	two.Add("b", []float32{1})
	two.Add("b", []float32{2, 3})
	other.Add("a", []float32{4})
	other.Add("b", []float32{1, 2, -3})
	require.Equal(t, one.Sum(), two.Sum())
	require.NotEqual(t, one.Sum(), other.Sum())
	require.Len(t, one.Sum(), 64)
	require.False(t, strings.ContainsAny(one.Sum(), "ABCDEF"))
}
