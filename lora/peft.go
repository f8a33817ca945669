package lora

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Files of an adapter in the layout of Hugging Face's PEFT.
const (
	ConfigFile  = "adapter_config.json"
	WeightsFile = "adapter_model.safetensors"
	prefix      = "base_model.model." // of the names of its tensors
)

// PEFT is the content of an adapter's adapter_config.json.
type PEFT struct {
	Options
	// Base is the folder of the adapter's base model, and Hash that model's BaseHash; "" if the
	// file does not give it.
	Base, Hash string
}

// peftConfig has the keys of adapter_config.json that Spillway writes or reads.
type peftConfig struct {
	PEFTType      string          `json:"peft_type"`
	TaskType      string          `json:"task_type,omitempty"`
	Base          string          `json:"base_model_name_or_path"`
	BaseHash      string          `json:"spillway_base_sha256,omitempty"`
	R             int             `json:"r"`
	Alpha         float64         `json:"lora_alpha"`
	Dropout       float64         `json:"lora_dropout"`
	Targets       json.RawMessage `json:"target_modules"`
	Bias          string          `json:"bias"`
	FanInFanOut   bool            `json:"fan_in_fan_out"`
	InferenceMode bool            `json:"inference_mode"`

	// Keys that change the result and are not supported.
	RSLoRA    bool               `json:"use_rslora"`
	DoRA      bool               `json:"use_dora"`
	LoRABias  bool               `json:"lora_bias,omitempty"`
	Saved     []string           `json:"modules_to_save"`
	Ranks     map[string]int     `json:"rank_pattern"`
	Alphas    map[string]float64 `json:"alpha_pattern"`
	Replicate json.RawMessage    `json:"layer_replication,omitempty"`
}

// Marshal returns the adapter_config.json of an adapter on these layers, which have Hugging
// Face's module names. transposed says that the model's weights are (in, out).
func (p *PEFT) Marshal(layers []string, transposed bool) ([]byte, error) {
	targets, err := json.Marshal(layers)
	if err != nil {
		return nil, err
	}
	text, err := json.MarshalIndent(peftConfig{PEFTType: "LORA", TaskType: "CAUSAL_LM", Base: p.Base, BaseHash: p.Hash, R: p.Rank, Alpha: p.Alpha,
		Dropout: p.Dropout, Targets: targets, Bias: "none", FanInFanOut: transposed, InferenceMode: true,
		Ranks: map[string]int{}, Alphas: map[string]float64{}}, "", "  ")
	return append(text, '\n'), err
}

// ParsePEFT reads adapter_config.json; tensors are the names in the adapter's file. The targets
// are the weights of these tensors, with {0-N} for consecutive layer numbers. Unsupported keys
// that change the result are errors that name the key.
func ParsePEFT(text []byte, tensors []string) (*PEFT, error) {
	c := peftConfig{R: 8, Alpha: 8, Bias: "none"} // PEFT's defaults
	if err := json.Unmarshal(text, &c); err != nil {
		return nil, fmt.Errorf("%s: %w", ConfigFile, err)
	}
	refuse := func(key string, v any) error {
		return fmt.Errorf("%s: %s is %v, which is not built; only plain LoRA is", ConfigFile, key, v)
	}
	switch {
	case !strings.EqualFold(c.PEFTType, "LORA"):
		return nil, refuse("peft_type", fmt.Sprintf("%.80q", c.PEFTType))
	case c.Bias != "none":
		return nil, refuse("bias", fmt.Sprintf("%.80q", c.Bias))
	case c.RSLoRA:
		return nil, refuse("use_rslora", true)
	case c.DoRA:
		return nil, refuse("use_dora", true)
	case c.LoRABias:
		return nil, refuse("lora_bias", true)
	case len(c.Saved) > 0:
		return nil, refuse("modules_to_save", c.Saved)
	case len(c.Ranks) > 0:
		return nil, refuse("rank_pattern", c.Ranks)
	case len(c.Alphas) > 0:
		return nil, refuse("alpha_pattern", c.Alphas)
	case len(c.Replicate) > 0 && string(c.Replicate) != "null":
		return nil, refuse("layer_replication", string(c.Replicate))
	}
	p := &PEFT{Options: Options{Rank: c.R, Alpha: c.Alpha, Dropout: c.Dropout}, Base: c.Base, Hash: c.BaseHash}
	var err error
	if p.Targets, err = targets(tensors); err == nil {
		err = p.Validate()
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", ConfigFile, err)
	}
	return p, nil
}

// targets returns patterns for the weights that an adapter's tensors belong to.
func targets(tensors []string) ([]string, error) {
	of := map[[2]string][]int{} // layer numbers by the name's parts before and after the number
	var list []string
	for _, name := range tensors {
		layer, ok := strings.CutSuffix(ParamName(name), SuffixA)
		if !ok && strings.HasSuffix(name, SuffixB) {
			continue
		}
		if !ok {
			return nil, fmt.Errorf("tensor %.80q is no part of a LoRA adapter", name)
		}
		parts := strings.Split(layer+".weight", ".")
		at := slices.IndexFunc(parts, func(part string) bool { _, err := strconv.ParseUint(part, 10, 16); return err == nil })
		if at < 0 {
			list = append(list, layer+".weight")
			continue
		}
		n, _ := strconv.Atoi(parts[at])
		around := [2]string{strings.Join(parts[:at], "."), strings.Join(parts[at+1:], ".")}
		of[around] = append(of[around], n)
	}
	for around, numbers := range of {
		slices.Sort(numbers)
		for len(numbers) > 0 {
			n := 1
			for n < len(numbers) && numbers[n] == numbers[0]+n {
				n++
			}
			list = append(list, fmt.Sprintf("%s.{%d-%d}.%s", around[0], numbers[0], numbers[n-1], around[1]))
			numbers = numbers[n:]
		}
	}
	slices.Sort(list)
	return list, nil
}

// ParamName returns the program's parameter name for a tensor in an adapter's file: without
// PEFT's prefix and the prefix of Hugging Face's GPT-2.
func ParamName(tensor string) string {
	return strings.TrimPrefix(strings.TrimPrefix(tensor, prefix), "transformer.")
}

// TensorName returns PEFT's name for a parameter. within is the prefix of the Hugging Face
// module that contains the program's names, "transformer." for GPT-2.
func TensorName(param, within string) string { return prefix + within + param }
