package main

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
)

// shape holds the dimensions of a GPT-2.
type shape struct{ layers, heads, width, vocab, positions int }

var (
	gpt2Small = shape{12, 12, 768, 50257, 1024}
	tinyShape = shape{3, 4, 64, 512, 64} // for the bits, and to try this program
)

// tensor is a parameter. Its initial values are normally distributed around mean.
type tensor struct {
	name      string
	shape     []int
	mean, std float64
}

func (t *tensor) elems() int {
	n := 1
	for _, d := range t.shape {
		n *= d
	}
	return n
}

// tensors returns the parameters with the names and layout of Hugging Face.
func (s shape) tensors() []tensor {
	c := s.width
	residual := 0.02 / math.Sqrt(2*float64(s.layers))
	list := []tensor{{"wte.weight", []int{s.vocab, c}, 0, 0.02}, {"wpe.weight", []int{s.positions, c}, 0, 0.01}}
	for i := range s.layers {
		h := fmt.Sprintf("h.%d.", i)
		list = append(list,
			tensor{h + "ln_1.weight", []int{c}, 1, 0.02}, tensor{h + "ln_1.bias", []int{c}, 0, 0.02},
			tensor{h + "attn.c_attn.weight", []int{c, 3 * c}, 0, 0.02}, tensor{h + "attn.c_attn.bias", []int{3 * c}, 0, 0.02},
			tensor{h + "attn.c_proj.weight", []int{c, c}, 0, residual}, tensor{h + "attn.c_proj.bias", []int{c}, 0, 0.02},
			tensor{h + "ln_2.weight", []int{c}, 1, 0.02}, tensor{h + "ln_2.bias", []int{c}, 0, 0.02},
			tensor{h + "mlp.c_fc.weight", []int{c, 4 * c}, 0, 0.02}, tensor{h + "mlp.c_fc.bias", []int{4 * c}, 0, 0.02},
			tensor{h + "mlp.c_proj.weight", []int{4 * c, c}, 0, residual}, tensor{h + "mlp.c_proj.bias", []int{c}, 0, 0.02})
	}
	return append(list, tensor{"ln_f.weight", []int{c}, 1, 0.02}, tensor{"ln_f.bias", []int{c}, 0, 0.02})
}

// writeConfig makes a folder with config.json.
func (s shape) writeConfig(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	config, err := json.Marshal(map[string]any{
		"model_type": "gpt2", "n_layer": s.layers, "n_head": s.heads, "n_embd": s.width, "vocab_size": s.vocab,
		"n_positions": s.positions, "n_ctx": s.positions, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
	})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "config.json"), config, 0o644)
}

// write makes a folder with config.json and model.safetensors of random weights.
func (s shape) write(dir string, seed uint64) error {
	if err := s.writeConfig(dir); err != nil {
		return err
	}
	head, off := map[string]any{}, 0
	list := s.tensors()
	for _, t := range list {
		end := off + 4*t.elems()
		head[t.name] = map[string]any{"dtype": "F32", "shape": t.shape, "data_offsets": []int{off, end}}
		off = end
	}
	h, err := json.Marshal(head)
	if err != nil {
		return err
	}
	for len(h)%8 != 0 {
		h = append(h, ' ')
	}
	f, err := os.Create(filepath.Join(dir, "model.safetensors"))
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(f, 1<<20)
	_, _ = w.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(h)))) // Flush returns the error
	_, _ = w.Write(h)
	rng := rand.New(rand.NewPCG(seed, 1))
	var buf [4]byte
	for _, t := range list {
		for range t.elems() {
			binary.LittleEndian.PutUint32(buf[:], math.Float32bits(float32(t.mean+t.std*rng.NormFloat64())))
			_, _ = w.Write(buf[:])
		}
	}
	if err := w.Flush(); err != nil {
		_ = f.Close()
		return err
	}
	return f.Close()
}

// tokens writes n random tokens below vocab as little-endian uint16. Each
// follows from the one before it half of the time, so that there is something to
// learn.
func tokens(path string, n, vocab int, seed uint64) error {
	rng := rand.New(rand.NewPCG(seed, 2))
	b := make([]byte, 0, 2*n)
	t := 0
	for range n {
		if rng.IntN(2) == 0 {
			t = (t*31 + 7) % vocab
		} else {
			t = rng.IntN(vocab)
		}
		b = binary.LittleEndian.AppendUint16(b, uint16(t))
	}
	return os.WriteFile(path, b, 0o644)
}
