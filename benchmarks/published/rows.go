package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spillway-ml/spillway/internal/published"
)

// drawSeed is the seed for drawing roles.
const drawSeed = 35

// draw gives a role to every row that has none, and says whether there were any. Within a stack and
// card, a random half of them calibrate (the larger half of an odd number). It uses no predictions
// and no throughputs.
func draw(records [][]string) (drawn bool) {
	groups := map[string][]int{}
	var order []string
	for i, rec := range records[1:] {
		if rec[0] != "" {
			continue
		}
		key := rec[1] + " " + rec[3] // stack and card
		if groups[key] == nil {
			order = append(order, key)
		}
		groups[key] = append(groups[key], i+1)
	}
	r := rand.New(rand.NewPCG(drawSeed, 0))
	for _, key := range order {
		rows := groups[key]
		r.Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
		for k, i := range rows {
			records[i][0] = "held-out"
			if 2*k < len(rows) {
				records[i][0] = "calibration"
			}
		}
	}
	return len(order) > 0
}

// modelOf returns the model to plan for a row: a preset's name, or a folder with a config.json of a
// shape. The folder is created under dir, and the model's positions are the row's tokens.
func modelOf(r *published.Row, dir string) (string, error) {
	family, text, ok := strings.Cut(r.Model, ":")
	if !ok {
		return r.Model, nil
	}
	var n []int
	for _, field := range strings.Split(text, ":") {
		v, err := strconv.Atoi(field)
		if err != nil {
			return "", fmt.Errorf("the model %q: %w", r.Model, err)
		}
		n = append(n, v)
	}
	var c map[string]any
	switch {
	case family == "gpt2" && len(n) == 4:
		c = map[string]any{
			"n_layer": n[0], "n_embd": n[1], "n_head": n[2], "vocab_size": n[3], "n_positions": r.Seq,
			"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": true,
		}
	case family == "llama" && len(n) == 6:
		c = map[string]any{
			"num_hidden_layers": n[0], "hidden_size": n[1], "num_attention_heads": n[2], "num_key_value_heads": n[3],
			"intermediate_size": n[4], "vocab_size": n[5], "max_position_embeddings": r.Seq,
			"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": false,
		}
	default:
		return "", fmt.Errorf("the model %q is no shape", r.Model)
	}
	c["model_type"] = family
	raw, err := json.Marshal(c)
	if err != nil {
		return "", err
	}
	folder := filepath.Join(dir, strings.ReplaceAll(r.Model, ":", "-")+"-"+strconv.Itoa(r.Seq))
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return "", err
	}
	return folder, os.WriteFile(filepath.Join(folder, "config.json"), raw, 0o644)
}
