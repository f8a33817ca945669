package saving

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/model"
)

// Formats of an exported model.
const (
	FormatHF   = "hf"   // a model's folder
	FormatPEFT = "peft" // adapters alone, in the layout of Hugging Face's PEFT
)

// ErrAdapters is the error for a checkpoint that can't be exported without merging its adapters.
var ErrAdapters = errors.New("has adapters, which a model's folder cannot hold")

// Base is the model that adapters belong to: its folder, and its lora.BaseHash.
type Base struct {
	Path   string `json:"path,omitempty"` // "": the base's values were drawn
	SHA256 string `json:"sha256"`
}

// AdaptersOf returns the adapters of the run that wrote a checkpoint, and the model that they
// belong to; zero values for a run without adapters.
func AdaptersOf(c *checkpoint.Checkpoint) (o lora.Options, base Base, err error) {
	var was Record
	if err = json.Unmarshal(c.Manifest.Run, &was); err == nil {
		o, err = lora.Parse(was.Settings["lora"])
	}
	if err != nil {
		return o, base, fmt.Errorf("%w: %s: %w", checkpoint.ErrDamaged, c.Folder, err)
	}
	if was.Base != nil {
		base = *was.Base
	}
	return o, base, nil
}

// ExportedModel returns the export of a checkpoint as a model's folder. If the checkpoint has
// adapters, they are merged.
func ExportedModel(c *checkpoint.Checkpoint) (checkpoint.Exporting, error) {
	var was Record
	_ = json.Unmarshal(c.Manifest.Run, &was) // Exported reports the error
	return Exported(c, FormatHF, was.Settings["lora"] != "", checkpoint.ShardBytes)
}

// Exported returns the export of a checkpoint in a format. merge adds the adapters' products to the
// weights of a model's folder. Without merge a checkpoint with adapters can only be exported in
// FormatPEFT.
func Exported(c *checkpoint.Checkpoint, format string, merge bool, shardBytes int64) (x checkpoint.Exporting, err error) {
	o, base, err := AdaptersOf(c)
	if err != nil {
		return x, err
	}
	switch peft := format == FormatPEFT; {
	case format != FormatHF && !peft:
		return x, fmt.Errorf("format %.80q is not known; use %s or %s", format, FormatHF, FormatPEFT)
	case peft && merge:
		return x, fmt.Errorf("format %s has the adapters alone, and merging leaves none; ask for one of the two", FormatPEFT)
	case !o.Active() && (peft || merge):
		return x, fmt.Errorf("%s has no adapters; export it as it is", c.Folder)
	case o.Active() && !peft && !merge:
		return x, fmt.Errorf("%s %w; merge them into its weights, or take format %s", c.Folder, ErrAdapters, FormatPEFT)
	}
	text, err := c.Read(model.ConfigFile)
	if err != nil {
		return x, err
	}
	shape, err := model.Parse(text)
	if err != nil {
		return x, err
	}
	x = checkpoint.Exporting{Files: []string{safetensors.FileName}, ShardBytes: shardBytes}
	view := adapters{o: o, gpt2: shape.Family == model.GPT2}
	if format == FormatPEFT {
		x.Weights = lora.WeightsFile
		x.View = func(r checkpoint.Tensors) (checkpoint.Tensors, error) { return view.alone(r), nil }
		layers := []string{}
		for _, t := range c.Manifest.Tensors {
			if layer, ok := strings.CutSuffix(t.Name, lora.SuffixA); ok {
				layers = append(layers, view.within()+layer)
			}
		}
		p := lora.PEFT{Options: o}
		p.Base, p.Hash = base.Path, base.SHA256
		text, err := p.Marshal(layers, view.gpt2)
		x.Blobs = []checkpoint.Blob{{Name: lora.ConfigFile, Data: text}}
		return x, err
	}
	for _, f := range c.Manifest.Files {
		if slices.Contains(ModelFiles(), f.Name) {
			x.Files = append(x.Files, f.Name)
		}
	}
	if merge {
		x.View = func(r checkpoint.Tensors) (checkpoint.Tensors, error) {
			return &merged{weights: r, adapters: view}, nil
		}
	}
	return x, nil
}

// adapters are the adapters of a checkpoint. A GPT-2's weights are (in, out), and its names in
// Hugging Face's layout have the prefix "transformer.".
type adapters struct {
	o    lora.Options
	gpt2 bool
}

func (a adapters) within() string {
	if a.gpt2 {
		return "transformer."
	}
	return ""
}

// weights are all tensors of a checkpoint's model.
type weights = checkpoint.Tensors

// alone returns the adapters of r under their PEFT names.
func (a adapters) alone(r checkpoint.Tensors) checkpoint.Tensors {
	return &renamed{weights: r, within: a.within()}
}

type renamed struct {
	weights
	within string
}

// Tensors lists the adapters.
func (r *renamed) Tensors() (list []safetensors.Tensor) {
	for _, t := range r.weights.Tensors() {
		if lora.IsAdapter(t.Name) {
			t.Name = lora.TensorName(t.Name, r.within)
			list = append(list, t)
		}
	}
	return list
}

// ReadFloat32 reads elements of an adapter.
func (r *renamed) ReadFloat32(name string, start int64, dst []float32) error {
	return r.weights.ReadFloat32(lora.ParamName(name), start, dst)
}

// merged presents weights with the products of their adapters added. The adapters are left out.
type merged struct {
	weights
	adapters
	of      string // the weight that product belongs to
	product *lora.Product
}

// Tensors lists the weights.
func (m *merged) Tensors() []safetensors.Tensor {
	return slices.DeleteFunc(m.weights.Tensors(), func(t safetensors.Tensor) bool { return lora.IsAdapter(t.Name) })
}

// ReadFloat32 reads elements of a weight with its adapter's product.
func (m *merged) ReadFloat32(name string, start int64, dst []float32) error {
	if err := m.weights.ReadFloat32(name, start, dst); err != nil {
		return err
	}
	if m.of != name {
		m.of, m.product = name, nil
		a, err := m.whole(lora.Layer(name) + lora.SuffixA)
		if a == nil || err != nil {
			return err
		}
		b, err := m.whole(lora.Layer(name) + lora.SuffixB)
		if err != nil {
			return err
		}
		if m.product, err = lora.NewProduct(m.o, a, b, m.gpt2); err != nil {
			return err
		}
	}
	if m.product != nil {
		m.product.AddTo(dst, start)
	}
	return nil
}

// whole reads a complete tensor; nil if there is none.
func (m *merged) whole(name string) ([]float32, error) {
	t, ok := m.Tensor(name)
	if !ok {
		return nil, nil
	}
	v := make([]float32, t.Elements())
	return v, m.weights.ReadFloat32(name, 0, v)
}
