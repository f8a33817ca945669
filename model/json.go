package model

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// ConfigFile is the name of Hugging Face's file with a model's shape, in the model's folder.
const ConfigFile = "config.json"

// Parse reads the text of a config.json. Each architecture has its keys, with transformers'
// meanings and defaults. Keys that change nothing are ignored. Unsupported keys that would change
// results are rejected, and the error names the key.
func Parse(data []byte) (Config, error) {
	o, err := parseObject(data)
	if err != nil {
		return Config{}, err
	}
	modelType := o.requiredString("model_type")
	if o.err != nil {
		return Config{}, o.err
	}
	var types []string
	for _, a := range archs {
		types = append(types, a.Types...)
		if slices.Contains(a.Types, modelType) {
			c := a.read(o, modelType)
			o.refuse()
			c.Dropouts = o.dropouts()
			if o.err != nil {
				return Config{}, o.err
			}
			return c, nil
		}
	}
	last := len(types) - 1
	return Config{}, fmt.Errorf("model_type %q is not supported; it must be %s or %s", cutText(modelType), strings.Join(types[:last], ", "), types[last])
}

// orderedMap keeps the order of Write's keys in the file.
type orderedMap []entry

type entry struct {
	key   string
	value any
}

func (m *orderedMap) add(key string, value any) { *m = append(*m, entry{key, value}) }

func (m orderedMap) MarshalJSON() ([]byte, error) {
	out := []byte{'{'}
	for i, e := range m {
		if i > 0 {
			out = append(out, ',')
		}
		k, err := json.Marshal(e.key)
		if err != nil {
			return nil, err
		}
		v, err := json.Marshal(e.value)
		if err != nil {
			return nil, err
		}
		out = append(append(append(out, k...), ':'), v...)
	}
	return append(out, '}'), nil
}

// Marshal returns the text of a config.json with c's shape, which transformers and Parse read as
// the same Config. torchDtype is the dtype of the weights beside it: float32 or bfloat16. ids are
// more keys, such as the tokenizer's eos_token_id. A Config that no model_type can express is an
// error.
func Marshal(c Config, torchDtype string, ids map[string]any) ([]byte, error) {
	a := archOf(c.Family)
	if a == nil || a.write == nil {
		return nil, fmt.Errorf("write model config: architecture %q has no config.json", c.Family)
	}
	var m orderedMap
	a.write(c, &m)
	m.add("vocab_size", c.Vocab)
	m.add("tie_word_embeddings", c.TiedHead)
	m.add("initializer_range", c.InitStd)
	m.add("torch_dtype", torchDtype)
	for _, key := range slices.Sorted(maps.Keys(ids)) {
		m.add(key, ids[key])
	}
	data, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("write model config: %w", err)
	}
	data = append(data, '\n')
	back, err := Parse(data)
	if err != nil {
		return nil, fmt.Errorf("write model config: %w", err)
	}
	if !back.SameModel(c) {
		return nil, fmt.Errorf("write model config: no model_type expresses %+v (QKVBias %v, OutBias %v, MLPBias %v); transformers has Llama, whose biases of attention come together, Qwen2, with QKVBias alone, Qwen3 and OLMo 2", c.Family, c.QKVBias, c.OutBias, c.MLPBias)
	}
	return data, nil
}

// SameModel says whether two Configs of config.json describe the same model. It compares all fields
// except Dropouts, and the contents of RopeScaling.
func (c Config) SameModel(d Config) bool {
	c.Dropouts, d.Dropouts = "", ""
	return reflect.DeepEqual(c, d)
}
