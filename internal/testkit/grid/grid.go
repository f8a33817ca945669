// Package grid is the set of configurations with which the project's promises are tested. It
// combines two models, ZeRO stages 0 to 3, with and without recomputation, everything on the
// device, on the host or on disk, and 1 and 3 ranks. Tests of bits and bytes use it with small
// models, benchmarks of predicted time with larger ones.
package grid

import (
	"fmt"
	"os"
	"path/filepath"
)

// Point is one configuration, given as values of train's flags.
type Point struct {
	Model     string // name of a Model
	Ranks     int
	Zero      int
	Recompute string
	Offload   string // "" for none
}

// Model is one of the grid's models, in one size.
type Model struct {
	Name   string
	Config string // config.json
	Batch  int    // rows a rank
	Seq    int
}

// Small are the models for tests: a step takes milliseconds.
var Small = []Model{
	{"gpt2", `{"model_type":"gpt2","n_layer":2,"n_head":4,"n_embd":32,"vocab_size":100,"n_positions":48}`, 2, 40},
	{"llama", `{"model_type":"llama","hidden_size":32,"intermediate_size":88,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"vocab_size":100,"max_position_embeddings":48,"tie_word_embeddings":false}`, 2, 40},
}

// Timed are the models for timing: a step takes tens of milliseconds and more.
var Timed = []Model{
	{"gpt2", `{"model_type":"gpt2","n_layer":4,"n_head":6,"n_embd":384,"vocab_size":4096,"n_positions":512}`, 2, 128},
	{"llama", `{"model_type":"llama","hidden_size":320,"intermediate_size":864,"num_hidden_layers":4,"num_attention_heads":5,"num_key_value_heads":5,"vocab_size":4096,"max_position_embeddings":512,"tie_word_embeddings":false}`, 2, 128},
}

var (
	Ranks      = []int{1, 3}
	Zeros      = []int{0, 1, 2, 3}
	Recomputes = []string{"none", "full"}
	Offloads   = []string{"", everything("host"), everything("disk")}
)

func everything(tier string) string {
	return fmt.Sprintf("optimizer=%[1]s,parameters=%[1]s,gradients=%[1]s,activations=%[1]s", tier)
}

// Points returns all points of the grid, in a fixed order.
func Points() (all []Point) {
	for _, m := range Small {
		for _, ranks := range Ranks {
			for _, zero := range Zeros {
				for _, recompute := range Recomputes {
					for _, offload := range Offloads {
						all = append(all, Point{m.Name, ranks, zero, recompute, offload})
					}
				}
			}
		}
	}
	return all
}

// Tier returns where the point keeps what can rest off the device: "none", "host" or "disk".
func (p Point) Tier() string {
	return map[string]string{Offloads[0]: "none", Offloads[1]: "host", Offloads[2]: "disk"}[p.Offload]
}

func (p Point) String() string {
	return fmt.Sprintf("%s, %d ranks, stage %d, recompute %s, offload %s", p.Model, p.Ranks, p.Zero, p.Recompute, p.Tier())
}

// ModelOf returns the model of a point in one of the sizes, Small or Timed.
func (p Point) ModelOf(size []Model) Model {
	for _, m := range size {
		if m.Name == p.Model {
			return m
		}
	}
	panic("grid: no model " + p.Model) // the sizes are this package's own
}

// Write writes the model's config.json into a new folder below dir and returns
// that folder.
func (m Model) Write(dir string) (string, error) {
	folder := filepath.Join(dir, m.Name)
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return "", fmt.Errorf("grid: %w", err)
	}
	if err := os.WriteFile(filepath.Join(folder, "config.json"), []byte(m.Config), 0o644); err != nil {
		return "", fmt.Errorf("grid: %w", err)
	}
	return folder, nil
}
