// Package tensors converts between Spillway's weights and dense tensors of gorgonia.org/tensor, for
// programs that compute with these: parameters of a run, and the weights of a Hugging Face folder
// or a checkpoint. Tensors are float32 and row-major, with Hugging Face's names and shapes. WriteNpy
// and ReadNpy of a tensor exchange it with NumPy.
//
// It is a separate package because gorgonia.org/tensor depends on Arrow and protobuf, which neither
// the command nor a program that only trains needs.
package tensors

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"

	"gorgonia.org/tensor"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/model"
)

// Source provides parameters by name, as a spillway.Trainer does.
type Source interface {
	// Parameter returns a copy of one parameter, by its Hugging Face name.
	Parameter(name string) (shape []int64, values []float32, err error)
}

// Parameter returns a copy of one parameter of a run.
func Parameter(s Source, name string) (*tensor.Dense, error) {
	shape, values, err := s.Parameter(name)
	if err != nil {
		return nil, err
	}
	return dense(name, shape, values)
}

// Sink accepts parameters by name, as a *spillway.Trainer does.
type Sink interface {
	// SetParameter replaces one parameter, by its Hugging Face name.
	SetParameter(name string, values []float32) error
}

// Set replaces a parameter of s by a tensor of float32 with the parameter's shape, in any memory
// order. It rejects values that are not finite.
func Set(s interface {
	Source
	Sink
}, name string, d *tensor.Dense) error {
	if d == nil || d.Dtype() != tensor.Float32 {
		return fmt.Errorf("set parameter %.80q: the tensor is not of float32", name)
	}
	shape, _, err := s.Parameter(name)
	if err != nil {
		return err
	}
	if want := dimensions(shape); !slices.Equal([]int(d.Shape()), want) {
		return fmt.Errorf("set parameter %.80q: the tensor has shape %v, want %v", name, d.Shape(), want)
	}
	values, err := inOrder(d)
	if err != nil {
		return fmt.Errorf("set parameter %.80q: %w", name, err)
	}
	return s.SetParameter(name, values)
}

func dimensions(shape []int64) []int {
	dims := make([]int, len(shape))
	for i, n := range shape {
		dims[i] = int(n)
	}
	return dims
}

// dense returns a tensor over values, without a copy.
func dense(name string, shape []int64, values []float32) (*tensor.Dense, error) {
	dims := dimensions(shape)
	if len(values) == 0 {
		return nil, fmt.Errorf("tensor %.80q of shape %v has no elements, which gorgonia.org/tensor does not have", name, shape)
	}
	if len(dims) == 0 {
		return tensor.New(tensor.FromScalar(values[0])), nil
	}
	return tensor.New(tensor.WithShape(dims...), tensor.WithBacking(values)), nil
}

// Load reads all weights at path: a .safetensors file, its sharded index, a Hugging Face folder, a
// checkpoint, or a folder of checkpoints (its newest complete one). F16 and BF16 are converted to
// float32 exactly; other types are errors.
func Load(ctx context.Context, path string) (map[string]*tensor.Dense, error) {
	saved, _, err := checkpoint.Take(ctx, filesys.System, path, safetensors.FileName, model.ConfigFile)
	if err != nil {
		return nil, err
	}
	var r checkpoint.Tensors
	if saved != nil {
		defer saved.Close()
		r, err = saved.State(checkpoint.ModelState)
	} else {
		r, err = safetensors.Open(path)
	}
	if err != nil {
		return nil, err
	}
	defer r.Close()
	all := map[string]*tensor.Dense{}
	for _, t := range r.Tensors() {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		n := t.Elements()
		if n > math.MaxInt/4 {
			return nil, fmt.Errorf("read weights %s: tensor %q has %d elements, too many for memory", path, t.Name, n)
		}
		values := make([]float32, n)
		if err := r.ReadFloat32(t.Name, 0, values); err != nil {
			return nil, err
		}
		if all[t.Name], err = dense(t.Name, t.Shape, values); err != nil {
			return nil, fmt.Errorf("read weights %s: %w", path, err)
		}
	}
	return all, nil
}

// Save writes float32 weights to a .safetensors file, completely or not at all. A folder with
// a file model.safetensors can be used as spillway.Config.Init. Views and transposed tensors are
// written in the order of their indices.
func Save(path string, weights map[string]*tensor.Dense) error {
	var list []safetensors.Tensor
	for name, d := range weights {
		if d == nil || d.Dtype() != tensor.Float32 {
			return fmt.Errorf("write weights %s: tensor %.80q is not of float32", path, name)
		}
		shape := make([]int64, d.Dims())
		for i, n := range d.Shape() {
			shape[i] = int64(n)
		}
		list = append(list, safetensors.Tensor{Name: name, DType: safetensors.F32, Shape: shape})
	}
	slices.SortFunc(list, func(a, b safetensors.Tensor) int { return cmp.Compare(a.Name, b.Name) })
	w, err := safetensors.Create(path, list, nil)
	if err != nil {
		return err
	}
	for _, t := range list {
		values, err := inOrder(weights[t.Name])
		if err == nil {
			err = w.WriteFloat32(t.Name, 0, values)
		}
		if err != nil {
			w.Abort()
			return fmt.Errorf("write weights %s: tensor %.80q: %w", path, t.Name, err)
		}
	}
	return w.Commit()
}

// inOrder returns the elements of a tensor in index order, the last index fastest: its own memory
// if that has this order, and otherwise a copy.
func inOrder(d *tensor.Dense) ([]float32, error) {
	values, ok := d.Data().([]float32)
	if !ok { // a scalar's data is its value
		value, ok := d.ScalarValue().(float32)
		if !ok {
			return nil, fmt.Errorf("its data is %T", d.Data())
		}
		return []float32{value}, nil
	}
	if o := d.DataOrder(); o.IsRowMajor() && !o.IsTransposed() && !d.RequiresIterator() {
		return values, nil
	}
	out := make([]float32, 0, d.Shape().TotalSize())
	at := make([]int, d.Dims())
	for range cap(out) {
		v, err := d.At(at...)
		if err != nil {
			return nil, err
		}
		out = append(out, v.(float32))
		for k := len(at) - 1; k >= 0; k-- {
			if at[k]++; at[k] < d.Shape()[k] {
				break
			}
			at[k] = 0
		}
	}
	return out, nil
}
